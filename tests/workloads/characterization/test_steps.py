"""Single steps, and how far they differ."""

from collections.abc import Sequence

import numpy as np
import polars as pl
import pytest

from tailrace.workloads.characterization.steps import COMPARED_STEPS, StepDistances, correct_and_wrong, distances


def step(number: int, groups: Sequence[int], lengths: Sequence[int]) -> pl.DataFrame:
    same = {"step": [number] * len(groups), "prompt_tokens": [5] * len(groups)}
    return pl.DataFrame(same | {"group": groups, "response_tokens": lengths})


def test_distances_are_the_greatest_differences_of_the_cumulative_distributions() -> None:
    # Of {1, 2}, {2, 3}, and {8, 9}: after 1 the first has half, the second nothing; the third begins above both.
    assert distances([[1, 2], [2, 3], [8, 9]]) == [[0.0, 0.5, 1.0], [0.5, 0.0, 1.0], [1.0, 1.0, 0.0]]


def test_steps_of_one_distribution_exceed_chance_in_one_of_twenty_cases() -> None:
    random = np.random.default_rng(0)
    pairs = [(random.lognormal(6, 0.5, 400), random.lognormal(6, 0.5, 400)) for _ in range(300)]
    compared = StepDistances.of([step(0, range(400), [1] * 400), step(1, range(400), [1] * 400)], None)
    assert compared is not None
    assert compared.responses_by_chance == compared.prompts_by_chance
    assert 0.02 < np.mean([distances(pair)[0][1] > compared.responses_by_chance for pair in pairs]) < 0.09


def test_samples_that_are_alike_count_as_fewer() -> None:
    steps = [step(number, [0, 0, 0, 0, 1, 1, 1, 1] * 50, range(1, 401)) for number in range(2)]
    for share, size in ((0.0, 400), (0.5, 400 / (1 + 199 * 0.5)), (1.0, 2), (-0.1, 400)):
        found = StepDistances.of(steps, share)
        assert found is not None
        assert found.responses_by_chance == pytest.approx(min(1, 1.358 * (2 / size) ** 0.5))
        assert found.prompts_by_chance == 1.0  # of two prompts


def test_of_many_steps_some_are_compared_from_the_first_to_the_last() -> None:
    steps = [step(number, [0], [number + 1]) for number in range(200)]
    found = StepDistances.of(steps, None)
    assert found is not None
    assert (len(found.steps), found.steps[0], found.steps[-1]) == (COMPARED_STEPS, 0, 199)
    assert found.response_tokens[0][1:] == [1.0] * (COMPARED_STEPS - 1)
    assert StepDistances.of(steps[:1], None) is None


def test_a_reward_above_zero_is_correct_and_no_reward_is_neither() -> None:
    samples = pl.DataFrame({"reward": [1.0, 0.0, -1.0, 0.5, None], "response_tokens": [10, 20, 30, 40, 50]})
    correct, wrong = correct_and_wrong(samples)
    assert correct is not None
    assert wrong is not None
    assert (correct.count, correct.mean, wrong.count, wrong.mean) == (2, 25.0, 2, 25.0)
    assert correct_and_wrong(samples.filter(pl.col("reward").is_null())) == (None, None)


def test_distances_are_between_nothing_and_everything() -> None:
    assert distances([[3]]) == [[0.0]]
    assert distances([[3, 3], [3]]) == pytest.approx(np.zeros((2, 2)))
