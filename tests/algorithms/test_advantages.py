import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tailrace.algorithms.advantages import group_normalized

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
