"""Normal scores, which make the samples of a prompt alike.

A sample has a standard normal number, its score, of which a part is its prompt's. The share of the normal distribution
below the score is the share of the lengths below its own. So the distribution of lengths stays exact. This is a
Gaussian copula with one random effect (Joe 2014, "Dependence modeling with copulas").
"""

from collections.abc import Callable
from math import factorial

import numpy as np
from numpy.polynomial import hermite_e
from scipy.special import ndtr

from tailrace.workloads.marginals.base import Array

_SCORES = np.linspace(-8, 8, 8001)
"""Points at which integrals over the normal distribution are taken; numbers of turns jump between them."""
_TERMS = 60
"""The terms of the expansion; lengths need a few, numbers of turns more."""


def shares_of(scores: Array) -> Array:
    """Return the share of a standard normal distribution below each of [n] scores, between 0 and 1."""
    return np.asarray(ndtr(scores)).clip(1e-15, 1 - 1e-15)


def score_share(quantile: Callable[[Array], Array], prompt_share: float) -> float:
    """Return the share of a score's variance that gives the logarithm of the amount its `prompt_share`.

    The two differ where the logarithm is not normal. With the expansion of log-quantile(Φ(z)) in Hermite polynomials,
    Σ c_k He_k(z) / √k!, two samples whose scores correlate with r have log-amounts that correlate with
    Σ c_k² r^k / Σ c_k², both from k = 1 on (Mehler's formula). The lower sum is the variance of the log-amounts.
    """
    weights = np.exp(-(_SCORES**2) / 2)
    weights /= weights.sum()
    logs = np.log(np.maximum(quantile(shares_of(_SCORES)), 1e-9))
    if np.ptp(logs) == 0:
        return 0.0
    logs -= weights @ logs
    norms = np.sqrt([float(factorial(k)) for k in range(1, _TERMS + 1)])
    terms = (weights * logs) @ hermite_e.hermevander(_SCORES, _TERMS)[:, 1:] / norms
    grid = np.linspace(0, 1, 1001)
    correlations = grid[:, None] ** np.arange(1, _TERMS + 1) @ (terms**2 / (weights @ logs**2))
    correlations[-1] = 1.0  # of all terms
    return float(np.interp(prompt_share, correlations, grid))


def score_correlation(rank_correlation: float) -> float:
    """Return the correlation of two normal scores whose ranks have this one (Spearman's).

    Source: Pearson 1907, "On further methods of determining correlation".
    """
    return float(2 * np.sin(np.pi * rank_correlation / 6))


def mixed(part: Array, rest: Array, share: float) -> Array:
    """Mix standard normal numbers: `part` explains `share` of the variance of the result, `rest` all else."""
    return np.asarray(np.sqrt(share) * part + np.sqrt(1 - share) * rest)
