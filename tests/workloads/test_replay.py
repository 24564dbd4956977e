"""A trace becomes the scripts of a run's responses."""

import re
from typing import Any

import polars as pl
import pytest

from tailrace.errors import TraceError
from tailrace.types import FinishReason
from tailrace.workloads.replay import Replay, Script, Turn
from tailrace.workloads.trace import COLUMNS, Provenance, Trace


def trace_of(*samples: dict[str, Any]) -> Trace:
    rows = [{"step": 0, "group": 0, "sample": 0, "prompt_tokens": 9, "response_tokens": 5} | row for row in samples]
    schema = {name: column.dtype for name, column in COLUMNS.items()}
    return Trace.of(pl.DataFrame(rows, schema=schema), Provenance(source="test"))


def test_the_groups_of_a_run_are_those_of_the_trace_by_step_and_number() -> None:
    replay = Replay.of(
        trace_of(
            {"step": 1, "group": 0, "response_tokens": 4},
            {"group": 7, "response_tokens": 3},
            {"group": 2, "sample": 1, "response_tokens": 2},
            {"group": 2, "response_tokens": 1},
        )
    )
    assert [[script.tokens for script in group] for group in replay.groups] == [[1, 2], [3], [4]]
    assert replay.script(0, 1) == Script(prompt_tokens=9, turns=(Turn(generated_tokens=2),))


@pytest.mark.parametrize(("group", "sample"), [(1, 0), (0, 2)])
def test_a_sample_that_the_trace_does_not_have_is_one_line(group: int, sample: int) -> None:
    replay = Replay.of(trace_of({}, {"sample": 1}))
    with pytest.raises(TraceError, match=f"has no sample {sample} of group {group} .* give it a longer"):
        replay.script(group, sample)


def test_tools_return_what_the_context_grows_by_and_take_their_calls_together() -> None:
    turns = [
        {"prompt_tokens": 9, "generated_tokens": 5},
        {"prompt_tokens": 34, "generated_tokens": 0},
        {"prompt_tokens": 40, "generated_tokens": 3},
    ]
    calls = [{"turn": turn, "seconds": seconds} for turn, seconds in ((0, 0.5), (0, 0.25), (1, 2.0))]
    row = {"response_tokens": 8, "turns": turns, "tool_calls": calls, "reward": 0.5, "reward_s": 0.75, "kept": False}
    [[script]] = Replay.of(trace_of(row)).groups
    first = Turn(generated_tokens=5, returned_tokens=40 - 9 - 5, tool_s=2.75)
    assert script.turns == (first, Turn(generated_tokens=3))
    assert (script.tokens, script.reward, script.reward_s, script.kept) == (34, 0.5, 0.75, False)


@pytest.mark.parametrize("name", ["prompt_tokens", "generated_tokens"])
def test_turns_of_unknown_length_are_not_played(name: str) -> None:
    turns = [{"prompt_tokens": 9, "generated_tokens": 2}, {"prompt_tokens": 30, "generated_tokens": 3} | {name: None}]
    with pytest.raises(TraceError, match=f"test has 1 turns without {name}; a replay needs them"):
        Replay.of(trace_of({"turns": turns}))


@pytest.mark.parametrize(
    ("limit", "turns"),
    [
        (34, (Turn(generated_tokens=5, returned_tokens=26, tool_s=1.0), Turn(generated_tokens=3))),
        (33, (Turn(generated_tokens=5, returned_tokens=26, tool_s=1.0), Turn(generated_tokens=2))),
        (31, (Turn(generated_tokens=5),)),
        (5, (Turn(generated_tokens=5),)),
        (2, (Turn(generated_tokens=2),)),
    ],
)
def test_a_script_is_cut_where_a_response_would_have_ended(limit: int, turns: tuple[Turn, ...]) -> None:
    whole = (Turn(generated_tokens=5, returned_tokens=26, tool_s=1.0), Turn(generated_tokens=3))
    script = Script(prompt_tokens=9, turns=whole, reward=1.0, reward_s=0.5)
    reason = FinishReason.LENGTH if limit < 34 else FinishReason.STOP
    assert script.cut(limit) == Script(prompt_tokens=9, turns=turns, reward=1.0, reward_s=0.5, finish_reason=reason)


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        ({"groups": 3}, "pipeline.replay has 2 groups, and the run takes 3; lower trainer.steps"),
        ({"group_size": 2}, "has 1 samples in its group 1, and algorithm.group_size is 2; lower it to 1 or less"),
        ({"max_new_tokens": 6}, "has a response of 7 tokens in its group 1, and sampling.max_new_tokens is 6; raise"),
    ],
)
def test_a_trace_that_does_not_fit_the_run_is_one_line(needs: dict[str, int], message: str) -> None:
    replay = Replay.of(trace_of({}, {"sample": 1}, {"group": 1, "response_tokens": 7}))
    replay.check(groups=2, group_size=1, max_new_tokens=7)
    with pytest.raises(TraceError, match=re.escape(message)):
        replay.check(**{"groups": 2, "group_size": 1, "max_new_tokens": 7} | needs)
