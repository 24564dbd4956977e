"""Histograms count every value once, in bins that suit the width of the distribution."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.workloads.characterization.histogram import BinnedDistribution, Histogram, JointHistogram

LENGTHS = st.lists(st.integers(1, 100_000), min_size=1, max_size=100)


def test_a_value_is_in_the_bin_that_begins_at_or_below_it() -> None:
    found = Histogram.of([4, 4, 5, 7])
    assert found.edges == [4, 5, 6, 7, 8]
    assert found.shares == [0.5, 0.25, 0.0, 0.25]


def test_equal_values_fill_one_bin() -> None:
    found = Histogram.of([300] * 5)
    assert (found.edges[0], found.shares[0]) == (300, 1.0)


def test_narrow_distributions_have_narrow_bins() -> None:
    assert len(Histogram.of([316, 318, 320, 325, 328]).shares) >= 6  # eight bins a doubling would put all into one
    wide = np.diff(np.log2(Histogram.of([1000, 64000]).edges))
    assert wide == pytest.approx(1 / 8, abs=0.002)


def test_seconds_keep_their_fractions_and_the_shortest_count_in_the_first_bin() -> None:
    found = Histogram.of([0.0, 0.00002, 0.25, 0.5], whole=False)
    assert found.edges[0] <= 1e-4 < found.edges[1]
    assert (found.shares[0], found.shares[-1]) == (0.5, 0.25)
    assert found.edges[-1] > 0.5


@given(LENGTHS)
def test_the_shares_up_to_an_edge_are_those_of_the_values_below_it(lengths: list[int]) -> None:
    found = Histogram.of(lengths)
    assert found.edges == sorted(set(found.edges))
    assert sum(found.shares) == pytest.approx(1)
    for edge, share in zip(found.edges[1:], np.cumsum(found.shares), strict=True):
        assert share == pytest.approx(sum(length < edge for length in lengths) / len(lengths))


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 5000)), min_size=1, max_size=50))
def test_a_joint_histogram_has_the_histograms_of_both_lengths_at_its_sides(pairs: list[tuple[int, int]]) -> None:
    prompts, responses = zip(*pairs, strict=True)
    found = JointHistogram.of(prompts, responses)
    counts = np.array(found.counts)
    for side, lengths, edges in ((0, prompts, found.prompt_edges), (1, responses, found.response_edges)):
        alone = Histogram.of(lengths)
        assert edges == alone.edges
        assert counts.sum(axis=side) / len(pairs) == pytest.approx(np.array(alone.shares))


def test_a_binned_distribution_has_the_figures_of_its_values() -> None:
    found = BinnedDistribution.binned([2, 4, 6])
    assert found is not None
    assert (found.mean, found.most, found.histogram.edges[0]) == (4.0, 6.0, 2.0)
    assert BinnedDistribution.binned([]) is None
