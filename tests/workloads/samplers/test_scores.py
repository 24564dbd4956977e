"""Scores are correlated so far that amounts are, against closed forms."""

import numpy as np
import pytest
from scipy import stats

from tailrace.workloads.marginals.lognormal import Lognormal
from tailrace.workloads.marginals.quantiles import Quantiles
from tailrace.workloads.marginals.shares import Shares
from tailrace.workloads.samplers.scores import score_correlation, score_share


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_scores_of_a_lognormal_amount_correlate_as_its_logarithms(share: float) -> None:
    assert score_share(Lognormal(log_mean=6.0, log_deviation=0.7).quantile, share) == pytest.approx(share, abs=1e-3)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.5, 0.8, 1.0])
def test_scores_of_one_turn_or_two_correlate_as_sheppard_says(share: float) -> None:
    # Two halves of the normal distribution correlate with 2 / pi * asin(r) (Sheppard 1899).
    assert score_share(Shares(shares=[0.5, 0.5]).quantile, share) == pytest.approx(np.sin(np.pi * share / 2), abs=1e-3)


def test_equal_amounts_need_no_scores() -> None:
    assert score_share(Quantiles(shares=[0.0, 1.0], values=[500.0, 500.0]).quantile, 0.5) == 0.0


def test_scores_of_correlated_ranks_correlate_a_little_more() -> None:
    random = np.random.default_rng(0)
    scores = random.multivariate_normal([0, 0], [[1, score_correlation(0.6)], [score_correlation(0.6), 1]], 50_000)
    assert stats.spearmanr(scores).statistic == pytest.approx(0.6, abs=0.01)
    assert [score_correlation(rank) for rank in (-1.0, 0.0, 1.0)] == pytest.approx([-1.0, 0.0, 1.0])
