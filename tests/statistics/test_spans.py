"""Claims on spans of time."""

import pytest

from tailrace.statistics.spans import covered_s


@pytest.mark.parametrize(
    ("spans", "seconds"), [([], 0), ([(0, 2), (1, 3)], 3), ([(5, 6), (0, 2)], 3), ([(0, 9), (1, 2), (8, 10)], 10)]
)
def test_time_that_spans_share_counts_once(spans: list[tuple[float, float]], seconds: float) -> None:
    assert covered_s(spans) == seconds
