"""An amount of samples: its distribution, and the share of its variance that the prompt explains."""

import numpy as np
import polars as pl

from tailrace.workloads.characterization.prompts import design_effect, intraclass_correlation
from tailrace.workloads.fits.choice import choose
from tailrace.workloads.marginals.base import Array
from tailrace.workloads.marginals.factory import AnyMarginal
from tailrace.workloads.parameters import Amount


def fit_amount(values: Array, prompts: pl.Series, share: float, family: str) -> Amount:
    """Return the amount of [n] values. Those of one prompt are alike, so they are worth fewer (`design_effect`).

    Args:
        prompts: [n] the number of each value's prompt.
        share: see `prompt_share`.

    Raises:
        FitError: see `choose`.
    """
    worth = len(values) / design_effect(len(values), prompts.n_unique(), share)
    return with_share(choose(values, family, worth), share)


def with_share(distribution: AnyMarginal, share: float) -> Amount:
    """Return the amount of a distribution. A file leaves out a share of 0."""
    return Amount(distribution=distribution, prompt_share=share) if share else Amount(distribution=distribution)


def prompt_share(values: Array, samples: pl.DataFrame) -> float:
    """Return the share of the variance of [n] values that their prompts explain.

    The estimate may be below 0 by chance, and is 0 then. Groups of one sample tell nothing of it; it is 0 as well.

    Args:
        samples: [n] rows with the columns `prompt` and `step`, the numbers of each value's prompt and step.
    """
    share = intraclass_correlation(np.maximum(values, 1), samples["prompt"], samples["step"])
    return 0.0 if share is None else max(0.0, share)


def choose_known(values: pl.Series, family: str) -> AnyMarginal | None:
    """Return the distribution of the values that are known (see `choose`); None without any.

    Raises:
        FitError: see `choose`.
    """
    known = values.drop_nulls()
    return choose(as_floats(known), family) if len(known) else None


def as_floats(values: pl.Series) -> Array:
    """Return a column as an array, for fits."""
    return values.cast(pl.Float64).to_numpy()
