"""All figures of a trace."""

from collections.abc import Sequence

import msgspec
import numpy as np
import polars as pl

from tailrace.workloads.characterization.correlation import Correlation
from tailrace.workloads.characterization.distribution import Distribution, known
from tailrace.workloads.characterization.histogram import BinnedDistribution, JointHistogram
from tailrace.workloads.characterization.prompts import LONGEST, PromptMap, intraclass_correlation
from tailrace.workloads.characterization.steps import (
    StepDistances,
    StepFigures,
    correct_and_wrong,
    kept_share,
    staleness,
)
from tailrace.workloads.characterization.tools import Tools
from tailrace.workloads.characterization.trend import TrendFigures
from tailrace.workloads.characterization.turns import Turns
from tailrace.workloads.trace import Provenance, Trace


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a trace. None where the trace does not have what a figure needs."""

    provenance: Provenance
    samples: int
    groups: int
    prompt_tokens: BinnedDistribution
    response_tokens: BinnedDistribution
    joint: JointHistogram
    correlation: Correlation | None
    """Of the tokens of prompt and response; None where one of them never varies."""
    prompt_share: float | None
    """See `intraclass_correlation`. `no_prompt_share` says why there is none."""
    prompt_map: PromptMap | None
    longest_recall: dict[int, float]
    """See `longest_recall`, by percentage: the mean over steps, weighted by samples. Empty for groups of one."""
    tail_share: float | None
    """See `tail_share`: the mean over steps. None for a service, whose requests do not begin together."""
    kept_share: float | None
    """The share of samples that the algorithm's filter has kept, of those that it has judged."""
    correct: Distribution | None
    """Response tokens of samples with a positive reward."""
    wrong: Distribution | None
    """Those of the other samples with a reward."""
    staleness: Distribution | None
    """Versions between the oldest weights that made a sample and those that its step trained."""
    turns: Turns | None
    tools: Tools | None
    prompt_trend: TrendFigures | None
    response_trend: TrendFigures | None
    turns_trend: TrendFigures | None
    distances: StepDistances | None
    steps: list[StepFigures]

    @classmethod
    def of(cls, trace: Trace) -> "Description":
        """Describe a trace."""
        samples = trace.samples
        frames = samples.partition_by("step", maintain_order=True)
        steps = [StepFigures.of(frame, is_service=trace.provenance.is_service) for frame in frames]
        prompt_tokens, response_tokens = samples["prompt_tokens"], samples["response_tokens"]
        prompt_share = intraclass_correlation(response_tokens, samples["group"], samples["step"])
        correct, wrong = correct_and_wrong(samples)
        return cls(
            provenance=trace.provenance,
            samples=len(samples),
            groups=trace.groups,
            prompt_tokens=known(BinnedDistribution.binned(prompt_tokens)),
            response_tokens=known(BinnedDistribution.binned(response_tokens)),
            joint=JointHistogram.of(prompt_tokens, response_tokens),
            correlation=Correlation.of(prompt_tokens, response_tokens),
            prompt_share=prompt_share,
            prompt_map=PromptMap.of(samples),
            longest_recall=_mean_recall(steps),
            tail_share=_mean_tail(steps),
            kept_share=kept_share(samples),
            correct=correct,
            wrong=wrong,
            staleness=Distribution.of(staleness(samples)),
            turns=Turns.of(samples),
            tools=Tools.of(samples),
            prompt_trend=_trend(samples, pl.col("prompt_tokens")),
            response_trend=_trend(samples, pl.col("response_tokens")),
            turns_trend=_trend(samples, pl.col("turns").list.len()),
            distances=StepDistances.of(frames, prompt_share),
            steps=steps,
        )

    @property
    def no_prompt_share(self) -> str:
        """Why it is unknown how much of the variance the prompt explains; empty where it is known."""
        if self.prompt_share is not None:
            return ""
        if self.samples == self.groups:
            return "one sample a group"
        if self.groups == len(self.steps):
            return "one group a step"
        is_equal = all(step.response_tokens.least == step.response_tokens.most for step in self.steps)
        return "equal lengths" if is_equal else "one group, or one sample a group, in each step"


def _mean_recall(steps: Sequence[StepFigures]) -> dict[int, float]:
    recalls = {}
    for percent in LONGEST:
        known_steps = [step for step in steps if percent in step.longest_recall]
        if known_steps:
            values = [step.longest_recall[percent] for step in known_steps]
            recalls[percent] = float(np.average(values, weights=[step.response_tokens.count for step in known_steps]))
    return recalls


def _mean_tail(steps: Sequence[StepFigures]) -> float | None:
    shares = [step.tail_share for step in steps if step.tail_share is not None]
    return float(np.mean(shares)) if shares else None


def _trend(samples: pl.DataFrame, amount: pl.Expr) -> TrendFigures | None:
    logs = samples.group_by("step").agg(amount.log().mean().alias("level")).drop_nulls().sort("step")
    return TrendFigures.of(logs["step"].to_list(), logs["level"].to_list())
