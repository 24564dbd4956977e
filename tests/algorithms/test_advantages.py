import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tailrace.algorithms.advantages import group_normalized, leave_one_out, mean_normalized, whitened

rewards = st.lists(st.floats(-100, 100), min_size=2, max_size=12)
EPS = 1e-6


@given(rewards)
def test_advantages_equal_torch_with_bessels_correction(group: list[float]) -> None:
    values = torch.tensor(group, dtype=torch.float64)
    expected = (values - values.mean()) / (values.std() + EPS)
    found = group_normalized(group, normalize_std=True, eps=EPS)
    np.testing.assert_allclose(found, expected, atol=1e-6, rtol=1e-6)


@given(rewards)
def test_without_normalization_rewards_are_only_centred(group: list[float]) -> None:
    found = group_normalized(group, normalize_std=False, eps=EPS)
    np.testing.assert_allclose(found, np.array(group) - np.mean(group), atol=1e-9)


def test_a_worked_example() -> None:
    found = group_normalized([1.0, 0.0, 0.0, 1.0], normalize_std=True, eps=EPS)
    assert found == pytest.approx([0.8660239, -0.8660239, -0.8660239, 0.8660239])


def test_equal_rewards_teach_nothing() -> None:
    assert group_normalized([0.3] * 4, normalize_std=True, eps=EPS) == pytest.approx([0.0] * 4)


@given(rewards, st.integers(0, 12))
def test_a_failed_grading_takes_no_part_and_gets_zero(group: list[float], place: int) -> None:
    place = min(place, len(group))
    found = group_normalized([*group[:place], math.nan, *group[place:]], normalize_std=True, eps=EPS)
    assert found.pop(place) == 0.0
    assert found == group_normalized(group, normalize_std=True, eps=EPS)


@pytest.mark.parametrize("group", [[1.0], [1.0, math.nan, math.nan], [math.nan, math.nan]])
def test_fewer_than_two_graded_samples_have_no_advantage(group: list[float]) -> None:
    assert group_normalized(group, normalize_std=True, eps=EPS) == [0.0] * len(group)


def test_each_sample_is_compared_with_the_others_of_its_group() -> None:
    # RLOO: 3 - (1 + 2) / 2, 1 - (3 + 2) / 2, 2 - (3 + 1) / 2; the sample that was not graded counts for nothing
    assert leave_one_out([3.0, math.nan, 1.0, 2.0]) == pytest.approx([1.5, 0.0, -1.5, 0.0])
    assert leave_one_out([3.0, math.nan]) == [0.0, 0.0]


def test_the_rarer_a_right_response_the_more_it_counts() -> None:
    # MaxRL: one of four is right, so the mean is 1/4
    assert mean_normalized([1, 0, 0, 0], eps=1e-9) == pytest.approx([3.0, -1.0, -1.0, -1.0])
    assert mean_normalized([1, 1, 0, 1], eps=1e-9) == pytest.approx([1 / 3, 1 / 3, -1.0, 1 / 3])
    assert mean_normalized([0, 0, 0], eps=1e-9) == [0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match=r"max_rl needs rewards of 0 or more, and one is -0\.5"):
        mean_normalized([1, -0.5], eps=1e-9)


def test_whitening_counts_the_tokens_of_the_masks_alone() -> None:
    values = [np.array([1.0, 99.0], np.float32), np.array([3.0, 5.0, math.nan], np.float32)]
    masks = [np.array([1.0, 0.0], np.float32), np.array([1.0, 1.0, 0.0], np.float32)]
    first, second = whitened(values, masks, eps=0.0)
    assert first.tolist() == pytest.approx([-1.0, 0.0])  # of 1, 3 and 5: the mean is 3, the deviation 2
    assert second.tolist() == pytest.approx([0.0, 1.0, 0.0])
    assert whitened([values[0]], [masks[0]], eps=0.0)[0].tolist() == [0.0, 0.0]
    assert whitened([], [], eps=0.0) == []
