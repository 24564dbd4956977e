"""What a training step of a workload has, in the mean."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tailrace.planning.allocation import Batches, mean_batches
from tailrace.simulator.scenario import Remaking
from tailrace.workloads.replay import Replay, Script


@dataclass(frozen=True, kw_only=True)
class Load:
    """The work of a training step, and the lengths of its responses."""

    groups: int
    group_size: int
    prompt: float
    """Tokens of a prompt."""
    read: float
    """Tokens that engines compute and do not generate: prompts, once for a group, and what tools return."""
    lengths: tuple[int, ...]
    """Generated tokens of responses of several steps, ascending."""
    context: float
    """Tokens of the context in the mean of all generated tokens."""
    longest: float
    """Generated tokens of a step's longest response."""
    tools_s: float
    """Seconds that tools take in the response that waits for them the longest."""
    grading_s: float
    """Seconds of all gradings of a step."""
    grade_s: float
    """Seconds of the longest grading of a step."""
    batches: Batches
    """What a trainer computes; its `micro_batch_tokens` stand for none."""
    attempts: float = 1.0
    """Groups that engines make for each that is trained on; `read` and `grading_s` are of all of them."""
    chain: float = 0.0
    """Generated tokens of the place of a step whose groups are remade the most often, one after the other; 0 where
    none is."""

    @property
    def samples(self) -> int:
        """Responses of a step that are trained on."""
        return self.groups * self.group_size

    @cached_property
    def mean(self) -> float:
        """Generated tokens of a response."""
        return statistics.fmean(self.lengths)

    def quantiles(self, count: int) -> list[int]:
        """So many lengths, each of which stands for an equal part of all responses."""
        each = len(self.lengths) / count
        return [self.lengths[int((number + 0.5) * each)] for number in range(count)]

    @classmethod
    def of(cls, replay: Replay, *, groups: int, remaking: Remaking | None = None) -> "Load":
        """The mean of a replay's steps, which have so many groups each. `remaking`: see `Scenario`."""
        again = [remaking is not None and remaking.wants(group) for group in replay.groups]
        trained = [group for group, thrown in zip(replay.groups, again, strict=True) if not thrown] or replay.groups
        attempts, chain = 1.0, 0.0
        if remaking is not None and any(again):
            share = statistics.fmean(again)
            attempts = remaking.attempts(share)
            longest = statistics.fmean(max(map(_generated, group)) for group in replay.groups)
            chain = longest * remaking.rounds(share, groups)
        steps = [replay.groups[first : first + groups] for first in range(0, len(replay.groups), groups)]
        scripts = [[script for group in step for script in group] for step in steps]
        every = [script for step in scripts for script in step]
        generated = [_generated(script) for script in every]
        prompts = sum(group[0].prompt_tokens for group in replay.groups)
        returned = sum(script.tokens for script in every) - sum(generated)
        attended = sum(own * (s.prompt_tokens + s.tokens / 2) for own, s in zip(generated, every, strict=True))
        return cls(
            groups=groups,
            group_size=len(replay.groups[0]),
            prompt=prompts / len(replay.groups),
            read=attempts * (prompts + returned) / len(steps),
            lengths=tuple(sorted(generated)),
            context=attended / sum(generated),
            longest=statistics.fmean(max(map(_generated, step)) for step in scripts),
            tools_s=statistics.fmean(max(map(_tools_s, step)) for step in scripts),
            grading_s=attempts * sum(script.reward_s for script in every) / len(steps),
            grade_s=statistics.fmean(max(script.reward_s for script in step) for step in scripts),
            batches=replace(_batches(trained, groups), longest=replay.longest_sample),
            attempts=attempts,
            chain=chain,
        )


def _batches(groups: Sequence[Sequence[Script]], per_step: int) -> Batches:
    return mean_batches(
        [(group[0].prompt_tokens, [script.tokens for script in group]) for group in groups],
        groups_per_step=per_step,
        micro_batch_tokens=1,
    )


def _generated(script: Script) -> int:
    return sum(turn.generated_tokens for turn in script.turns)


def _tools_s(script: Script) -> float:
    return sum(turn.tool_s for turn in script.turns)
