"""An amount of samples: its distribution, and the share of its variance that the prompt explains."""

import numpy as np
import polars as pl

from tailrace.workloads.characterization.prompts import intraclass_correlation
from tailrace.workloads.fits.choice import choose
from tailrace.workloads.marginals.base import Array
from tailrace.workloads.marginals.factory import AnyMarginal
from tailrace.workloads.parameters import Amount


def with_prompts(distribution: AnyMarginal, values: Array, samples: pl.DataFrame) -> Amount:
    """Return the amount of a distribution, with the share of [n] values that their prompts explain.

    The estimate may be below 0 by chance, and is 0 then. Groups of one sample tell nothing of it; it is 0 as well.

    Args:
        samples: [n] rows with the columns `prompt` and `step`, the numbers of each value's prompt and step.
    """
    share = intraclass_correlation(np.maximum(values, 1), samples["prompt"], samples["step"])
    if share is None or share <= 0:
        return Amount(distribution=distribution)
    return Amount(distribution=distribution, prompt_share=share)


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
