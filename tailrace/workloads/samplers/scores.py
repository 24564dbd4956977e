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

_NODES = 120
_TERMS = 30
"""The terms of the expansion; lengths need a few, numbers of turns more."""


def shares_of(scores: Array) -> Array:
    """Return the share of a standard normal distribution below each of [n] scores, between 0 and 1."""
    return np.asarray(ndtr(scores)).clip(1e-15, 1 - 1e-15)


def score_share(quantile: Callable[[Array], Array], prompt_share: float) -> float:
    """Return the share of a score's variance that gives the logarithm of the amount its `prompt_share`.

    The two differ where the logarithm is not normal. With the expansion of log-quantile(Φ(z)) in Hermite polynomials,
    Σ c_k He_k(z) / √k!, two samples whose scores correlate with r have log-amounts that correlate with
    Σ c_k² r^k / Σ c_k², both from k = 1 on (Mehler's formula).
    """
    nodes, weights = hermite_e.hermegauss(_NODES)
    logs = np.log(np.maximum(quantile(shares_of(nodes)), 1e-9))
    terms = (
        (weights * logs)
        @ hermite_e.hermevander(nodes, _TERMS)
        / np.sqrt([float(factorial(k)) for k in range(_TERMS + 1)])
    )
    squares = terms[1:] ** 2
    if not squares.sum():
        return 0.0
    grid = np.linspace(0, 1, 1001)
    correlations = grid[:, None] ** np.arange(1, _TERMS + 1) @ (squares / squares.sum())
    return float(np.interp(prompt_share, correlations, grid))


def mixed(part: Array, rest: Array, share: float) -> Array:
    """Mix standard normal numbers: `part` explains `share` of the variance of the result, `rest` all else."""
    return np.asarray(np.sqrt(share) * part + np.sqrt(1 - share) * rest)
