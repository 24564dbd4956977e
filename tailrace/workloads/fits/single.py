"""Fits responses of one turn."""

import polars as pl
from scipy import stats

from tailrace.workloads.fits.amounts import as_floats, fit_amount, prompt_share
from tailrace.workloads.parameters import Single

_CHANCE = 0.01
"""The probability of as clear a correlation by chance, below which it is believed."""


def fit_single(samples: pl.DataFrame, limit: int | None, family: str) -> Single:
    """Fit the samples of a trace, from whose lengths any drift has been taken.

    Args:
        samples: with the columns `prompt` and `step` (their numbers), `prompt_tokens`, `response_tokens` and `level`,
            which is the length without drift.
        limit: `max_new_tokens`.

    Raises:
        FitError: see `choose`.
    """
    ended = samples if limit is None else samples.filter(pl.col("response_tokens") < limit)
    share = prompt_share(as_floats(samples["level"]), samples)
    return Single(
        tokens=fit_amount(as_floats(ended["level"]), ended["prompt"], share, family),
        rank_correlation=_correlation(samples),
        capped_share=None if limit is None else 1 - len(ended) / len(samples),
    )


def _correlation(samples: pl.DataFrame) -> float:
    """Return the rank correlation of prompts and responses; 0 where prompts by themselves show none.

    The samples of a prompt are not independent, so its mean log-length is the observation.
    """
    prompts = samples.group_by("prompt").agg(pl.col("prompt_tokens").first(), pl.col("level").log().mean())
    if len(prompts) < 3 or prompts["prompt_tokens"].n_unique() == 1 or prompts["level"].n_unique() == 1:
        return 0.0
    if stats.spearmanr(prompts["prompt_tokens"], prompts["level"]).pvalue >= _CHANCE:
        return 0.0
    return float(stats.spearmanr(samples["prompt_tokens"], samples["level"]).statistic)
