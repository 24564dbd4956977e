"""95 % intervals of an evaluation's figures, since its prompts are a sample of all that could be asked.

Answers to one prompt are alike, so the number of prompts counts, and not that of answers: Miller 2024, "Adding Error
Bars to Evals", arXiv:2411.00640, section 3 ("clustered standard errors").
"""

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, pvariance, stdev

LEVEL = 0.95
_Z = NormalDist().inv_cdf((1 + LEVEL) / 2)

Interval = tuple[float, float]


def fraction_interval(scores: Sequence[float], answers: int) -> Interval:
    """Return the interval of the mean of `scores`, one for each prompt, between 0 and 1. `answers`: their number in
    all.

    This is Wilson's score interval (1927) for the effective number of trials. That is the number of prompts, or more
    where the scores vary less than those of single answers would (Korn and Graubard 1998), but not more than the
    answers. With one answer to each prompt it is Wilson's interval itself.
    """
    mean, prompts = fmean(scores), len(scores)
    single, spread = mean * (1 - mean), pvariance(scores)
    trials = min(float(answers), prompts * single / spread) if spread > 0 else float(answers if single > 0 else prompts)
    trials = max(trials, float(prompts))
    middle = (mean + _Z**2 / (2 * trials)) / (1 + _Z**2 / trials)
    half = _Z / (1 + _Z**2 / trials) * math.sqrt(single / trials + _Z**2 / (4 * trials**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def mean_interval(scores: Sequence[float]) -> Interval | None:
    """Return the interval of the mean of `scores`, one for each prompt, by its standard error; None for a single
    prompt."""
    if len(scores) < 2:
        return None
    half = _Z * stdev(scores) / math.sqrt(len(scores))
    return fmean(scores) - half, fmean(scores) + half
