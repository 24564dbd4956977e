"""Correlations, against values worked out by hand."""

import polars as pl
import pytest

from tailrace.workloads.characterization.correlation import Correlation


def test_the_two_coefficients_see_different_things() -> None:
    found = Correlation.of(pl.Series([1, 2, 4, 8]), pl.Series([1, 4, 16, 64]))  # the square
    assert found is not None
    assert found.spearman == pytest.approx(1)
    assert 0.9 < found.pearson < 0.99


def test_equal_values_share_the_mean_of_their_ranks() -> None:
    # Ranks 1.5, 1.5, 3 and 1, 2, 3: covariance 1.5, squares of deviations 1.5 and 2.
    found = Correlation.of(pl.Series([5, 5, 9]), pl.Series([1, 2, 3]))
    assert found is not None
    assert found.spearman == pytest.approx(1.5 / (1.5 * 2) ** 0.5)


def test_what_never_varies_correlates_with_nothing() -> None:
    assert Correlation.of(pl.Series([5, 5, 5]), pl.Series([1, 2, 3])) is None
