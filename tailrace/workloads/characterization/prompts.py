"""How far the samples of a prompt are alike, and what a scheduler that knows that can gain.

PolyTrace (section 3.1, figure 5) sees similar lengths within a prompt. StreamRL (section 5.2) ranks prompts by length.
"""

from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

LONGEST = (20, 10, 5)
"""The percentages of longest samples whose recall is told."""
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


def intraclass_correlation(lengths: npt.ArrayLike, groups: npt.ArrayLike) -> float | None:
    """The share of the variance of log-length that the prompt explains, from 0 (and below, by chance) to 1.

    It is the one-way random-effects estimate, ICC(1) (Shrout and Fleiss 1979, "Intraclass correlations"), with the
    mean size of unequal groups that the analysis of variance asks for. None where no group has two samples, there is
    one group alone, or all lengths are equal.

    Args:
        lengths: [n] tokens.
        groups: [n] the number of each sample's prompt.
    """
    logs = np.log(np.asarray(lengths, np.float64))
    _, index, counts = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
    samples, prompts = len(logs), len(counts)
    if prompts < 2 or samples == prompts:
        return None
    means = np.bincount(index, logs) / counts
    between = float((counts * (means - logs.mean()) ** 2).sum()) / (prompts - 1)
    within = float(((logs - means[index]) ** 2).sum()) / (samples - prompts)
    size = (samples - float((counts**2).sum()) / samples) / (prompts - 1)
    total = between + (size - 1) * within
    return (between - within) / total if total else None


def longest_recall(lengths: npt.ArrayLike, groups: npt.ArrayLike, percent: float) -> float | None:
    """The share of the longest `percent` that is found by the mean length of each prompt's other samples.

    As many samples are foretold as there are longest ones. Between equal lengths chance decides which are longest, so
    chance alone finds `percent` also where many samples end at a limit. None where no prompt has two samples.

    Args:
        lengths: [n] tokens of the samples of one step.
        groups: [n] the number of each sample's prompt; samples without another of their prompt are left out.
    """
    array = np.asarray(lengths, np.float64)
    _, index, counts = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
    known = counts[index] > 1
    if not known.any():
        return None
    others = (np.bincount(index, array)[index] - array)[known] / (counts[index][known] - 1)
    array = array[known]
    wanted = max(1, round(len(array) * percent / 100))
    return float(_greatest(array, wanted) @ _greatest(others, wanted)) / wanted


def _greatest(values: npt.NDArray[np.float64], wanted: int) -> npt.NDArray[np.float64]:
    """The chance of each of [n] values to be among the `wanted` greatest, of which equal ones have the same."""
    least = np.partition(values, -wanted)[-wanted]
    above, equal = values > least, values == least
    return np.asarray(np.where(equal, (wanted - above.sum()) / equal.sum(), above))
