"""How near the samples of fitted parameters come to the trace that they were fitted to."""

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np
import polars as pl
from scipy import stats

from tailrace.workloads.fits.amounts import as_floats
from tailrace.workloads.marginals.base import Array
from tailrace.workloads.parts import calls_of, turns_of
from tailrace.workloads.samplers.base import Workload
from tailrace.workloads.trace import Trace

PERCENTILES = (50, 90, 99)
_DRAWN = 50_000
"""About as many samples are drawn, so that chance adds little to the errors."""
_MOST_TURNS = 3
"""The turns that have lines of their own."""


class Goodness(msgspec.Struct, frozen=True, kw_only=True):
    """The errors of one amount, in percent of the trace's figure; positive where what is drawn is larger."""

    name: str
    ks: float
    """The Kolmogorov-Smirnov statistic: the greatest distance of the two cumulative distributions."""
    errors: dict[int, float]
    """Of the percentiles of `PERCENTILES`."""
    most_error: float
    """Of the greatest value: of the median of the greatest of as many drawn values as the trace has."""

    @property
    def worst(self) -> float:
        """The greatest error of a percentile, without its sign."""
        return max(abs(error) for error in self.errors.values())


def goodness(trace: Trace, workload: Workload) -> list[Goodness]:
    """Compare a trace with samples that are drawn from a workload: prompts, responses, turns, tools, rewards."""
    known = dict(_amounts(_drawn(trace, workload)))
    return [_compared(name, values, known[name]) for name, values in _amounts(trace) if name in known]


def _drawn(trace: Trace, workload: Workload) -> Trace:
    """Draw the steps that the trace has, since lengths may drift, with many times its groups."""
    sizes = trace.samples.group_by("step", "group").len()["len"]
    size, draws = int(sizes.to_numpy().max()), max(1, round(_DRAWN / len(trace)))
    groups = -(-len(trace) // (size * len(trace.steps)))
    steps = [step - trace.steps[0] for step in trace.steps]
    drawn = workload.sample(steps=steps[-1] + 1, groups=groups * draws, group_size=size, seed=0)
    return replace(drawn, samples=drawn.samples.filter(pl.col("step").is_in(steps)))


def _amounts(trace: Trace) -> Iterator[tuple[str, Array]]:
    """Yield the amounts of a trace that it has values of."""
    samples = trace.samples
    yield "prompt tokens", as_floats(samples["prompt_tokens"])
    yield "response tokens", as_floats(samples["response_tokens"])
    if samples["turns"].null_count() < len(samples):
        turns, calls = turns_of(trace), calls_of(trace)
        yield "turns", as_floats(samples["turns"].drop_nulls().list.len())
        for number in range(_MOST_TURNS):
            of_turn = turns.filter(pl.col("turn") == number)
            yield from _known(f"tokens of turn {number + 1}", of_turn["generated_tokens"])
        yield from _known("tokens that a turn reads", turns["prompt_tokens"])
        yield from _known("tokens from tools", calls["returned_tokens"])
        yield from _known("seconds of tools", calls["seconds"])
    yield from _known("seconds of rewards", samples["reward_s"])


def _known(name: str, values: pl.Series) -> Iterator[tuple[str, Array]]:
    if len(known := values.drop_nulls()):
        yield name, as_floats(known)


def _compared(name: str, true: Array, drawn: Array) -> Goodness:
    shares = [percentile / 100 for percentile in PERCENTILES]
    errors = [_error(*pair) for pair in zip(np.quantile(true, shares), np.quantile(drawn, shares), strict=True)]
    most = np.quantile(drawn, 0.5 ** (1 / len(true)), method="inverted_cdf")  # below which all are in half of the cases
    return Goodness(
        name=name,
        ks=float(stats.ks_2samp(true, drawn).statistic),
        errors=dict(zip(PERCENTILES, errors, strict=True)),
        most_error=_error(true.max(), float(most)),
    )


def _error(true: float, drawn: float) -> float:
    if true == drawn:
        return 0.0
    return float(100 * (drawn - true) / true) if true else float("inf")
