"""The recall of the greatest values, by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.statistics.ranking import mean_of_others, recall_of_greatest


def test_half_of_the_greatest_are_found() -> None:
    assert recall_of_greatest([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [0, 0, 0, 0, 0, 0, 0, 9, 0, 8], 20) == 0.5


def test_chance_decides_between_equal_ones() -> None:
    assert recall_of_greatest([5, 5, 5, 5], [1, 2, 3, 4], 25) == pytest.approx(0.25)
    assert recall_of_greatest([1, 2, 3, 4], [7, 7, 7, 7], 50) == pytest.approx(0.5)


def test_a_number_that_is_not_whole_is_between_its_neighbours() -> None:
    values = [1, 2, 3, 4]
    one, two = (recall_of_greatest(values, [1, 2, 4, 3], percent) for percent in (25, 50))
    assert (one, two) == (0.0, 1.0)
    assert recall_of_greatest(values, [1, 2, 4, 3], 40) == pytest.approx(0.6)


def test_fewer_than_one_value_have_no_recall() -> None:
    assert recall_of_greatest([1, 2, 3], [1, 2, 3], 20) is None


@given(st.lists(st.integers(0, 20), min_size=2, max_size=30), st.floats(1, 100))
def test_the_values_themselves_find_no_less_than_any_prediction(values: list[int], percent: float) -> None:
    best = recall_of_greatest(values, values, percent)
    other = recall_of_greatest(values, values[::-1], percent)
    if best is None:
        assert other is None
    else:
        assert other is not None
        assert -1e-9 <= other <= best + 1e-9 <= 1 + 2e-9


def test_the_others_of_a_group_do_not_count_the_value_itself() -> None:
    found = mean_of_others([1, 3, 5, 10, 20, 7], [0, 0, 0, 2, 2, 1])
    np.testing.assert_allclose(found, [4, 3, 2, 20, 10, np.nan])
