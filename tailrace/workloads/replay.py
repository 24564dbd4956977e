"""A trace as the script of a run: how long each response is, what its tools return and when, and its reward.

The k-th group of a run plays the k-th group of the trace, by step and number.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Self

import polars as pl

from tailrace.errors import TraceError
from tailrace.host.collector import spared
from tailrace.types import FinishReason
from tailrace.workloads.parts import check_known, turns_of
from tailrace.workloads.trace import COLUMNS, Provenance, Trace

_READ = (
    "step",
    "group",
    "prompt_tokens",
    "response_tokens",
    "turns",
    "tool_calls",
    "reward",
    "reward_s",
    "finish_reason",
    "kept",
)
"""Columns of a trace that a script is made of, and those that groups are known by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the model generates at a stretch, and what its tools answer."""

    generated_tokens: int
    returned_tokens: int = 0
    """Tokens of the tools' answers that the model reads before the next turn."""
    tool_s: float = 0.0
    """Seconds that the tools take; calls of one turn are made one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One response. It has at least one turn."""

    prompt_tokens: int
    turns: tuple[Turn, ...]
    reward: float | None = None
    reward_s: float = 0.0
    """Seconds of its grading."""
    finish_reason: FinishReason = FinishReason.STOP
    """Why it ended; stop where the trace does not say."""
    kept: bool | None = None
    """Whether the algorithm of the trace trained on it; None where the trace does not say."""

    @property
    def tokens(self) -> int:
        """Tokens after the prompt: what the model generates and what its tools return."""
        return sum(turn.generated_tokens + turn.returned_tokens for turn in self.turns)

    def scaled(self, factor: float) -> "Script":
        """The script with all lengths multiplied by `factor`, and at least 1. Seconds stay."""
        return replace(
            self,
            prompt_tokens=_times(self.prompt_tokens, factor),
            turns=tuple(
                Turn(
                    generated_tokens=_times(turn.generated_tokens, factor),
                    returned_tokens=_times(turn.returned_tokens, factor) if turn.returned_tokens else 0,
                    tool_s=turn.tool_s,
                )
                for turn in self.turns
            ),
        )

    def cut(self, max_new_tokens: int) -> "Script":
        """The script of a response that ends after `max_new_tokens`, those of tools among them."""
        turns: list[Turn] = []
        left = max_new_tokens
        for turn in self.turns:
            generated = min(turn.generated_tokens, left)
            left -= generated + turn.returned_tokens
            if left <= 0:  # what the tools return would not leave room for another token
                turns.append(Turn(generated_tokens=generated))
                break
            turns.append(turn)
        reason = FinishReason.LENGTH if self.tokens > max_new_tokens else self.finish_reason
        return replace(self, turns=tuple(turns), finish_reason=reason)


def _times(tokens: int, factor: float) -> int:
    return max(1, round(tokens * factor))


class Replay:
    """The scripts of all groups."""

    def __init__(self, groups: Sequence[Sequence[Script]]) -> None:
        """`groups`: in the order in which the run takes them; none is empty."""
        self.groups = groups

    @property
    def has_turns(self) -> bool:
        """Whether a response has several turns."""
        return any(len(script.turns) > 1 for group in self.groups for script in group)

    @classmethod
    def of(cls, trace: Trace) -> Self:
        """Read the scripts of a trace.

        Raises:
            TraceError: the tokens of a turn are unknown.
        """
        check_known(trace, turns_of(trace), "a replay")
        rows = trace.samples.select(_READ).iter_rows(named=True)  # in the order of step, group and sample
        with spared():
            return cls([[_script(row) for row in group] for _, group in groupby(rows, key=_group)])

    def trace(self, provenance: Provenance, *, groups_per_step: int) -> Trace:
        """The scripts as a trace, whose steps have so many groups each."""
        rows = [
            _row(number // groups_per_step, number % groups_per_step, sample, script)
            for number, group in enumerate(self.groups)
            for sample, script in enumerate(group)
        ]
        return Trace.of(pl.DataFrame(rows, {name: column.dtype for name, column in COLUMNS.items()}), provenance)

    def map(self, change: Callable[[Script], Script]) -> "Replay":
        """The replay with every script changed."""
        return Replay([[change(script) for script in group] for group in self.groups])

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(script.prompt_tokens for group in self.groups for script in group)

    @property
    def longest_response(self) -> int:
        """Tokens of the longest response, those of tools among them."""
        return max(script.tokens for group in self.groups for script in group)

    @property
    def longest_sample(self) -> int:
        """Tokens of the longest sample, with its prompt."""
        return max(script.prompt_tokens + script.tokens for group in self.groups for script in group)

    def script(self, group: int, sample: int) -> Script:
        """The script of a sample, by the number of its group in the run and its own number in the group.

        Raises:
            TraceError: there is none. A training loop of the caller's own may take more groups than the recipe says.
        """
        if group >= len(self.groups) or sample >= len(self.groups[group]):
            raise TraceError(
                f"pipeline.replay has no sample {sample} of group {group} (from 0), which the run takes; give it a "
                "longer trace, or fewer prompts"
            )
        return self.groups[group][sample]

    def first(self, *, groups: int, group_size: int, name: str = "pipeline.replay") -> "Replay":
        """The first groups, and of each the first samples: what a run of so many plays.

        Raises:
            TraceError: groups or samples are missing. The message calls the trace `name`.
        """
        if len(self.groups) < groups:
            raise TraceError(
                f"{name} has {len(self.groups)} groups, and the run takes {groups}; lower trainer.steps or "
                "trainer.train_batch_size"
            )
        for number, group in enumerate(self.groups[:groups]):
            if len(group) < group_size:
                raise TraceError(
                    f"{name} has {len(group)} samples in its group {number}, and algorithm.group_size is "
                    f"{group_size}; lower it to {min(map(len, self.groups[:groups]))} or less"
                )
        return Replay([group[:group_size] for group in self.groups[:groups]])

    def check(self, *, groups: int, group_size: int, max_new_tokens: int) -> None:
        """Check that a run of so many groups can play the trace.

        Raises:
            TraceError: groups or samples are missing, or a response is too long.
        """
        for number, group in enumerate(self.first(groups=groups, group_size=group_size).groups):
            if (longest := max(script.tokens for script in group)) > max_new_tokens:
                raise TraceError(
                    f"pipeline.replay has a response of {longest} tokens in its group {number}, and "
                    f"sampling.max_new_tokens is {max_new_tokens}; raise it"
                )


def _group(row: Mapping[str, Any]) -> tuple[int, int]:
    return row["step"], row["group"]


def _script(row: Mapping[str, Any]) -> Script:
    tokens, turns, calls = row["response_tokens"], row["turns"], row["tool_calls"]
    if not turns and not calls and tokens:
        played: Iterable[Turn] = (Turn(generated_tokens=tokens),)
    else:
        seconds: dict[int, float] = {}
        for call in calls or ():
            seconds[call["turn"]] = seconds.get(call["turn"], 0.0) + (call["seconds"] or 0.0)
        played = _turns(turns or [{"prompt_tokens": row["prompt_tokens"], "generated_tokens": tokens}], seconds)
    return Script(
        prompt_tokens=row["prompt_tokens"],
        turns=tuple(played),
        reward=row["reward"],
        reward_s=row["reward_s"] or 0.0,
        finish_reason=FinishReason(row["finish_reason"] or FinishReason.STOP),
        kept=row["kept"],
    )


def _row(step: int, group: int, sample: int, script: Script) -> dict[str, Any]:
    turns, context = [], script.prompt_tokens
    for turn in script.turns:
        turns.append({"prompt_tokens": context, "generated_tokens": turn.generated_tokens})
        context += turn.generated_tokens + turn.returned_tokens
    calls = [
        {"turn": number, "seconds": turn.tool_s, "returned_tokens": turn.returned_tokens}
        for number, turn in enumerate(script.turns[:-1])
    ]
    return {
        "step": step,
        "group": group,
        "sample": sample,
        "prompt_tokens": script.prompt_tokens,
        "response_tokens": sum(turn.generated_tokens for turn in script.turns),
        "finish_reason": script.finish_reason.value,
        "reward": script.reward,
        "reward_s": script.reward_s,
        "kept": script.kept,
        "turns": turns if len(turns) > 1 else None,
        "tool_calls": calls or None,
    }


def _turns(turns: Sequence[Mapping[str, Any]], seconds: Mapping[int, float]) -> Iterator[Turn]:
    """The turns that generate something. Tools return what the context grows by between one turn and the next."""
    kept = [(number, turn) for number, turn in enumerate(turns) if turn["generated_tokens"]]
    for (number, turn), (following, after) in zip(kept, [*kept[1:], (len(turns), None)], strict=True):
        grown = 0 if after is None else after["prompt_tokens"] - turn["prompt_tokens"] - turn["generated_tokens"]
        tool_s = sum(seconds.get(between, 0.0) for between in range(number, following))
        yield Turn(generated_tokens=turn["generated_tokens"], returned_tokens=max(0, grown), tool_s=tool_s)
