"""The steps of a trace: how each drains, how they differ, and how its figures move."""

import math
from collections.abc import Sequence
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from tailrace.workloads.characterization.distribution import Distribution, known, mean
from tailrace.workloads.characterization.prompts import LONGEST, design_effect, intraclass_correlation, longest_recall

COMPARED_STEPS = 48
"""The most steps that are compared with each other."""


class StepFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One step. None where it does not have what a figure needs; see `Description`."""

    step: int
    prompt_tokens: Distribution
    response_tokens: Distribution
    correct: Distribution | None
    wrong: Distribution | None
    turns: Distribution | None
    kept_share: float | None
    staleness: Distribution | None
    prompt_share: float | None
    longest_recall: dict[int, float]
    tail_share: float | None

    @classmethod
    def of(cls, samples: pl.DataFrame, *, is_service: bool) -> Self:
        """Describe the samples of one step."""
        lengths, groups = samples["response_tokens"], samples["group"]
        correct, wrong = correct_and_wrong(samples)
        recalls = {percent: longest_recall(lengths, groups, percent) for percent in LONGEST}
        return cls(
            step=int(samples["step"][0]),
            prompt_tokens=known(Distribution.of(samples["prompt_tokens"])),
            response_tokens=known(Distribution.of(lengths)),
            correct=correct,
            wrong=wrong,
            turns=Distribution.of(samples["turns"].drop_nulls().list.len()),
            kept_share=kept_share(samples),
            staleness=Distribution.of(staleness(samples)),
            prompt_share=intraclass_correlation(lengths, groups, samples["step"]),
            longest_recall={percent: recall for percent, recall in recalls.items() if recall is not None},
            tail_share=None if is_service else tail_share(lengths),
        )


class StepDistances(msgspec.Struct, frozen=True, kw_only=True):
    """How far the distributions of each two steps are apart (PolyTrace, figure 7).

    A distance is Kolmogorov and Smirnov's: the greatest difference of the two cumulative distributions. It is 0 for
    equal distributions, and 1 where all values of one lie below all of the other.
    """

    steps: list[int]
    """[s] those that are compared: at most `COMPARED_STEPS`, evenly chosen."""
    prompt_tokens: list[list[float]]
    """[s][s]"""
    response_tokens: list[list[float]]
    """[s][s]"""
    prompts_by_chance: float
    """The distance that two samplings of one distribution exceed in one of 20 cases, for steps of the median size."""
    responses_by_chance: float
    """The same for responses. Those to one prompt are alike, so they count as fewer (`design_effect`)."""

    @classmethod
    def of(cls, steps: Sequence[pl.DataFrame], prompt_share: float | None) -> Self | None:
        """Compare steps; None where there is one alone.

        Args:
            prompt_share: see `Description`.
        """
        if len(steps) < 2:
            return None
        places = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), COMPARED_STEPS)).round().astype(int))
        chosen = [steps[place] for place in places]
        samples, prompts = (float(np.median(sizes)) for sizes in zip(*map(_sizes, chosen), strict=True))
        independent = samples / design_effect(samples, prompts, max(0.0, prompt_share or 0.0))
        return cls(
            steps=[int(step["step"][0]) for step in chosen],
            prompt_tokens=distances([step["prompt_tokens"] for step in chosen]),
            response_tokens=distances([step["response_tokens"] for step in chosen]),
            prompts_by_chance=_by_chance(prompts),
            responses_by_chance=_by_chance(independent),
        )


def _sizes(step: pl.DataFrame) -> tuple[int, int]:
    return len(step), step["group"].n_unique()


def _by_chance(size: float) -> float:
    """The 95 % quantile of the distance of two samplings of `size` each: Smirnov's limit for large ones."""
    return min(1.0, 1.358 * math.sqrt(2 / size))


def distances(columns: Sequence[npt.ArrayLike]) -> list[list[float]]:
    """The [s, s] distances of Kolmogorov and Smirnov between columns of tokens, none of them empty."""
    sorted_columns = [np.sort(np.asarray(column)) for column in columns]
    places = np.unique(np.concatenate(sorted_columns))
    cumulative = np.stack([np.searchsorted(column, places, side="right") / len(column) for column in sorted_columns])
    return [np.abs(cumulative - row).max(axis=1).tolist() for row in cumulative]


def tail_share(lengths: npt.ArrayLike, *, running: float = 0.1) -> float:
    """The share of a step's generation in which fewer than `running` of its samples still run.

    All samples begin together, and a token takes the same time however many run. In truth tokens of few samples take
    less time, so this is an upper bound.

    Args:
        lengths: [n] tokens of the samples of one step, one or more.
    """
    array = np.sort(np.asarray(lengths, np.float64))
    left = len(array) - np.arange(1, len(array) + 1)  # that run on when the sample at this place has ended
    begins = array[np.argmax(left < running * len(array))]
    return float(1 - begins / array[-1])


def correct_and_wrong(samples: pl.DataFrame) -> tuple[Distribution | None, Distribution | None]:
    """The lengths of responses with a positive reward, and of the other ones that have a reward."""
    rewarded = samples.filter(pl.col("reward").is_not_null())
    lengths, right = rewarded["response_tokens"], rewarded["reward"] > 0
    return Distribution.of(lengths.filter(right)), Distribution.of(lengths.filter(~right))


def kept_share(samples: pl.DataFrame) -> float | None:
    """The share of samples that the algorithm's filter has kept, of those that it has judged; None without any."""
    return mean(samples["kept"])


def staleness(samples: pl.DataFrame) -> pl.Series:
    """The staleness of each sample with a known version: step `s` trains version `s` of the weights."""
    return (samples["step"] - samples["first_version"]).drop_nulls()
