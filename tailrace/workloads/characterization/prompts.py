"""How far the samples of a prompt are alike, and what a scheduler that knows that can gain.

PolyTrace (section 3.1, figure 5) sees similar lengths within a prompt. StreamRL (section 5.2) ranks prompts by length.
"""

from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from tailrace.statistics.ranking import mean_of_others, recall_of_greatest

LONGEST = (20, 10, 5)
"""The percentages of longest samples whose recall is a figure."""
MAPPED_PROMPTS = 128
"""The most prompts of a map."""
MAPPED_SAMPLES = 64
"""The most samples of each of them."""


class PromptMap(msgspec.Struct, frozen=True, kw_only=True):
    """The lengths of the responses to the prompts of one step (PolyTrace, figure 5)."""

    step: int
    """The one with the most samples; of several, the first."""
    lengths: list[list[int]]
    """[p][samples] tokens, from the prompt with the least mean to that with the greatest: at most `MAPPED_PROMPTS`,
    evenly chosen, and at most `MAPPED_SAMPLES` of each."""

    @classmethod
    def of(cls, samples: pl.DataFrame) -> Self | None:
        """Map one step of a trace; None where no prompt has two samples."""
        step = samples["step"].value_counts().sort("count", "step", descending=[True, False])["step"][0]
        lengths = pl.col("response_tokens")
        groups = samples.filter(pl.col("step") == step).group_by("group", maintain_order=True).agg(lengths)
        if groups["response_tokens"].list.len().max() == 1:
            return None
        ordered = groups.sort(lengths.list.mean(), maintain_order=True)["response_tokens"].list.head(MAPPED_SAMPLES)
        places = np.linspace(0, len(ordered) - 1, min(len(ordered), MAPPED_PROMPTS)).round().astype(int)
        return cls(step=int(step), lengths=ordered.gather(places).to_list())


def intraclass_correlation(lengths: npt.ArrayLike, groups: npt.ArrayLike, steps: npt.ArrayLike) -> float | None:
    """The share of the variance of log-length within a step that the prompt explains, from 0 (below, by chance) to 1.

    It is the one-way random-effects estimate, ICC(1) (Shrout and Fleiss 1979, "Intraclass correlations"), of the
    deviations from the means of steps, so that a drift over steps is no effect of prompts. The steps are fixed effects
    of the analysis of variance, as in method 3 of Henderson (1953, "Estimation of variance and covariance components").
    With N samples in P prompts and S steps, n_p of each prompt and N_s of each step, the mean squares are

        between = Σ_p n_p (mean_p - mean_s)² / (P - S)        within = Σ_i (log_i - mean_p)² / (N - P)

    The mean size of unequal groups that the analysis asks for is size = (N - Σ_s Σ_p n_p² / N_s) / (P - S), with the
    inner sum over the prompts of step s. The share is (between - within) / (between + (size - 1) within).

    None where no group has two samples, no step has two groups, no step both, or the lengths of each step are equal.

    Args:
        lengths: [n] tokens.
        groups: [n] the number of each sample's prompt in its step.
        steps: [n] the number of each sample's step.
    """
    samples = pl.DataFrame({"log": np.log(np.asarray(lengths, np.float64)), "group": groups, "step": steps})
    log, mean, size = pl.col("log"), pl.col("mean"), pl.col("size")
    prompts = samples.group_by("step", "group", maintain_order=True).agg(
        pl.len().cast(pl.Float64).alias("size"),
        log.mean().alias("mean"),
        ((log - log.mean()) ** 2).sum().alias("within"),
    )
    step_mean = (size * mean).sum() / size.sum()
    sums = prompts.group_by("step", maintain_order=True).agg(
        (size * (mean - step_mean) ** 2).sum().alias("between"), pl.col("within").sum(), (size**2).sum() / size.sum()
    )
    between_degrees, within_degrees = len(prompts) - len(sums), len(samples) - len(prompts)
    if not between_degrees or not within_degrees or samples.group_by("step").agg(log.n_unique())["log"].max() == 1:
        return None
    between, within = float(sums["between"].sum()) / between_degrees, float(sums["within"].sum()) / within_degrees
    group_size = (len(samples) - float(sums["size"].sum())) / between_degrees
    total = between + (group_size - 1) * within
    return (between - within) / total if total and group_size > 1 else None


def design_effect(samples: float, prompts: float, share: float) -> float:
    """How many samples tell as much as an independent one, since those of a prompt are alike: 1 + (m - 1) share.

    Source: Kish 1965, "Survey Sampling", section 5.4, for groups of m samples.

    Args:
        samples: their number, in as many groups as there are `prompts`.
        share: see `intraclass_correlation`, from 0 on.
    """
    return 1 + (samples / prompts - 1) * share


def longest_recall(lengths: npt.ArrayLike, groups: npt.ArrayLike, percent: float) -> float | None:
    """The share of the longest `percent` that is found by the mean length of each prompt's other samples.

    See `recall_of_greatest`. In small steps chance finds less than `percent`, since a sample is not among its own
    others. None where no prompt has two samples, and where the longest are fewer than one sample.

    Args:
        lengths: [n] tokens of the samples of one step.
        groups: [n] the number of each sample's prompt; samples without another of their prompt are left out.
    """
    array, others = np.asarray(lengths, np.float64), mean_of_others(lengths, groups)
    known = np.isfinite(others)
    return recall_of_greatest(array[known], others[known], percent)
