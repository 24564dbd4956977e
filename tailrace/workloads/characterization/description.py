"""All figures of a trace."""

from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import polars as pl

from tailrace.workloads.characterization.distribution import Distribution
from tailrace.workloads.characterization.prompts import LONGEST, intraclass_correlation, longest_recall
from tailrace.workloads.characterization.steps import tail_share
from tailrace.workloads.trace import Provenance, Trace


class StepFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One step."""

    step: int
    prompt_tokens: Distribution
    response_tokens: Distribution


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a trace. None where the trace does not have what a figure needs."""

    provenance: Provenance
    samples: int
    groups: int
    prompt_tokens: Distribution
    response_tokens: Distribution
    correlation: float | None
    """Pearson's, of the tokens of prompt and response; None where one of them never varies."""
    prompt_share: float | None
    """See `intraclass_correlation`."""
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
    turns: Distribution | None
    """Turns of a sample."""
    tool_seconds: Distribution | None
    returned_tokens: Distribution | None
    """Tokens that a tool call has returned."""
    steps: list[StepFigures]

    @classmethod
    def of(cls, trace: Trace) -> "Description":
        """Describe a trace."""
        samples = trace.samples
        rewarded = samples.filter(pl.col("reward").is_not_null())
        calls = samples["tool_calls"].drop_nulls().explode().drop_nulls()
        kept = samples["kept"].mean()
        return cls(
            provenance=trace.provenance,
            samples=len(samples),
            groups=trace.groups,
            prompt_tokens=_whole(samples["prompt_tokens"]),
            response_tokens=_whole(samples["response_tokens"]),
            correlation=_correlation(samples),
            prompt_share=_prompt_share(samples),
            longest_recall=_recall(samples),
            tail_share=None if trace.provenance.is_service else _over_steps(samples, tail_share),
            kept_share=None if kept is None else float(kept),  # type: ignore[arg-type]
            correct=Distribution.of(rewarded.filter(pl.col("reward") > 0)["response_tokens"]),
            wrong=Distribution.of(rewarded.filter(pl.col("reward") <= 0)["response_tokens"]),
            turns=Distribution.of(samples["turns"].drop_nulls().list.len()),
            tool_seconds=Distribution.of(calls.struct.field("seconds").drop_nulls()),
            returned_tokens=Distribution.of(calls.struct.field("returned_tokens").drop_nulls()),
            steps=[
                StepFigures(
                    step=int(frame["step"][0]),
                    prompt_tokens=_whole(frame["prompt_tokens"]),
                    response_tokens=_whole(frame["response_tokens"]),
                )
                for frame in _steps(samples)
            ],
        )


def _steps(samples: pl.DataFrame) -> Iterator[pl.DataFrame]:
    yield from samples.partition_by("step", maintain_order=True)


def _whole(values: pl.Series) -> Distribution:
    distribution = Distribution.of(values)
    assert distribution is not None, "a trace has samples"
    return distribution


def _correlation(samples: pl.DataFrame) -> float | None:
    pair = samples.select("prompt_tokens", "response_tokens").to_numpy().astype(np.float64)
    if not pair.std(axis=0).all():
        return None
    return float(np.corrcoef(pair, rowvar=False)[0, 1])


def _prompt_share(samples: pl.DataFrame) -> float | None:
    prompts = samples.select(pl.struct("step", "group").rank("dense")).to_series()
    return intraclass_correlation(samples["response_tokens"], prompts)


def _over_steps(samples: pl.DataFrame, figure: Callable[[pl.Series], float]) -> float:
    return float(np.mean([figure(frame["response_tokens"]) for frame in _steps(samples)]))


def _recall(samples: pl.DataFrame) -> dict[int, float]:
    recalls: dict[int, float] = {}
    for percent in LONGEST:
        found = [
            (recall, len(step))
            for step in _steps(samples)
            if (recall := longest_recall(step["response_tokens"], step["group"], percent)) is not None
        ]
        if found:
            values, weights = zip(*found, strict=True)
            recalls[percent] = float(np.average(values, weights=weights))
    return recalls
