"""A description has the figures that its trace can give, and no others."""

from collections.abc import Sequence

import polars as pl
import pytest

from tailrace.workloads.characterization.description import Description
from tailrace.workloads.trace import Provenance, Trace

CALL = {"turn": 0, "name": "search", "seconds": 0.5, "returned_tokens": 30, "status": None, "cached": None}
TURN = {"prompt_tokens": 10, "cached_tokens": None, "generated_tokens": 5, "engine_s": None}


def described(*, is_service: bool = False, **columns: Sequence[object]) -> Description:
    size = len(columns["response_tokens"])
    numbers = {"step": [0] * size, "group": [0] * size, "sample": list(range(size)), "prompt_tokens": [10] * size}
    return Description.of(Trace.of(pl.DataFrame(numbers | columns), Provenance(source="test", is_service=is_service)))


def test_figures_of_steps_and_prompts_are_those_of_their_samples() -> None:
    found = described(
        step=[0, 0, 0, 0, 1, 1],
        group=[0, 0, 1, 1, 0, 0],
        prompt_tokens=[10, 10, 20, 20, 30, 30],
        response_tokens=[5, 5, 8, 8, 11, 11],
    )
    assert (found.samples, found.groups, [step.step for step in found.steps]) == (6, 3, [0, 1])
    assert [step.response_tokens.mean for step in found.steps] == [6.5, 11.0]
    assert found.correlation is not None
    assert found.correlation.pearson == pytest.approx(1.0)
    assert found.prompt_share == pytest.approx(1.0)
    assert found.longest_recall == {}  # a fifth of four samples is less than one
    assert found.tail_share == 0.0
    assert [found.turns, found.tools, found.kept_share, found.correct] == [None] * 4


def test_rewards_filters_turns_and_tools_are_described_where_a_trace_has_them() -> None:
    found = described(
        response_tokens=[5, 9, 100],
        reward=[1.0, 0.0, None],
        kept=[True, False, None],
        turns=[
            [TURN | {"generated_tokens": 2}, TURN | {"generated_tokens": 3}],
            [TURN | {"generated_tokens": 9}],
            None,
        ],
        tool_calls=[[CALL, CALL | {"seconds": 1.5}], [], None],
    )
    assert found.correct is not None
    assert found.wrong is not None
    assert (found.correct.mean, found.wrong.mean, found.kept_share) == (5.0, 9.0, 0.5)
    assert found.turns is not None
    assert found.turns.counts.mean == 1.5
    assert found.tools is not None
    assert found.tools.seconds is not None
    assert (found.tools.seconds.count, found.tools.seconds.mean) == (2, 1.0)
    assert found.tools.returned_tokens is not None
    assert found.tools.returned_tokens.mean == 30.0


def test_a_service_has_no_prompts_to_compare_and_no_steps_to_drain() -> None:
    found = described(is_service=True, group=[0, 1, 2], sample=[0, 0, 0], response_tokens=[5, 9, 100])
    assert found.prompt_share is None
    assert found.no_prompt_share == "one sample a group"
    assert found.prompt_map is None
    assert found.tail_share is None
    assert found.longest_recall == {}
    assert found.correlation is None  # all prompts are as long


def test_figures_move_over_steps_as_their_samples_do() -> None:
    steps = [step for step in range(8) for _ in range(4)]
    found = described(
        step=steps,
        group=[0, 0, 1, 1] * 8,
        sample=[0, 1, 0, 1] * 8,
        response_tokens=[100 * 2**step + sample for step, sample in zip(steps, [0, 1, 2, 3] * 8, strict=True)],
        first_version=[max(0, step - 2) for step in steps],
        kept=[step % 2 == 0 for step in steps],
        reward=[0.0, 1.0] * 16,
    )
    assert found.response_trend is not None
    assert found.response_trend.drift == pytest.approx(1.0, abs=0.02)  # it doubles
    assert found.response_trend.change.step == 4
    assert found.prompt_trend is not None
    assert not found.prompt_trend.is_clear
    assert found.turns_trend is None
    assert found.distances is not None
    assert found.distances.response_tokens[0][1] == 1.0
    assert [step.kept_share for step in found.steps] == [1.0, 0.0] * 4
    assert [step.staleness and step.staleness.mean for step in found.steps] == [0, 1, 2, 2, 2, 2, 2, 2]
    assert found.staleness is not None
    assert found.staleness.most == 2.0
    assert [step.correct and step.correct.mean for step in found.steps][:2] == [102.0, 202.0]


@pytest.mark.parametrize(
    ("group", "lengths", "reason"),
    [
        ([0, 1], [5, 9], "one sample a group"),
        ([0, 0], [5, 9], "one group a step"),
        ([0, 0, 1, 1], [5] * 4, "equal lengths"),
    ],
)
def test_what_a_prompt_explains_is_unknown_for_a_reason(group: list[int], lengths: list[int], reason: str) -> None:
    found = described(group=group, response_tokens=lengths)
    assert (found.prompt_share, found.no_prompt_share) == (None, reason)


def test_groups_that_cannot_be_compared_are_said_to_be_so() -> None:
    found = described(step=[0, 0, 1, 1], group=[0, 1, 0, 0], sample=[0, 0, 0, 1], response_tokens=[5, 6, 7, 8])
    assert found.prompt_share is None
    assert found.no_prompt_share == "one group, or one sample a group, in each step"
