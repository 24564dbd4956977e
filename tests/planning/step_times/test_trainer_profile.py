"""Claims on times that follow from a trainer's profile."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.planning.packing import GroupPart
from tailrace.planning.step_times.trainer_profile import MicroBatchPoint, ProfiledTrainer, TrainerProfile

SHAPES = [(10, (20,)), (10, (200,)), (300, (20,)), (50, (100, 30, 20)), (500, (500, 500)), (1, (1,))]


def profile(costs: tuple[float, float, float, float]) -> TrainerProfile:
    def seconds(part: GroupPart) -> float:
        amounts = (1, part.tokens, part.tokens - part.prompt_tokens, part.pairs)
        return sum(cost * amount for cost, amount in zip(costs, amounts, strict=True))

    parts = [GroupPart((0,), *shape) for shape in SHAPES]
    points = [MicroBatchPoint.of([part], seconds(part)) for part in parts]
    return TrainerProfile(
        model="m",
        hardware="h",
        precision="fp32",
        threads=1,
        update=points,
        score=points,
        optimizer_s=0.5,
        weights_s=0.1,
    )


@given(st.tuples(*[st.floats(1e-6, 1.0)] * 4), st.integers(1, 1000), st.lists(st.integers(1, 1000), min_size=1))
def test_times_that_follow_the_form_are_found_again(
    costs: tuple[float, float, float, float], prompt: int, responses: list[int]
) -> None:
    part = GroupPart(tuple(range(len(responses))), prompt, tuple(responses))
    base, token, scored, pair = costs
    expected = base + token * part.tokens + scored * sum(responses) + pair * part.pairs
    times = ProfiledTrainer(profile(costs))
    assert times.update_s([part]) == pytest.approx(expected, rel=1e-3)
    assert times.error == pytest.approx(0, abs=1e-4)
    critic = ProfiledTrainer(profile(costs), gives_values=True)
    assert critic.update_s([part]) == pytest.approx(expected - scored * sum(responses), rel=1e-3)
