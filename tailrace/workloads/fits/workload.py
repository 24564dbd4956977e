"""Fits a whole workload."""

import polars as pl

from tailrace.errors import TraceError
from tailrace.workloads.characterization.distribution import Distribution
from tailrace.workloads.fits.amounts import as_floats, choose_known
from tailrace.workloads.fits.choice import check_family, choose
from tailrace.workloads.fits.drift import fit_drift
from tailrace.workloads.fits.single import fit_single
from tailrace.workloads.fits.turns import fit_turns, has_turns
from tailrace.workloads.marginals.base import FitError
from tailrace.workloads.parameters import FORMAT, Figures, Parameters, Regime, Single, Trend, Turns
from tailrace.workloads.parts import numbered
from tailrace.workloads.trace import Trace

_LEAST = 100
"""Fewer samples say nothing of p99."""


def fit_workload(trace: Trace, name: str, *, family: str = "auto") -> Parameters:
    """Fit the parameters of a workload to a trace.

    Args:
        name: of the workload.
        family: of all distributions of tokens and seconds (`CHOICES`); auto takes the best one for each amount.

    Raises:
        TraceError: the family is unknown or does not converge, there are fewer than 100 samples, all responses are
            equally long, or the tokens of a turn are unknown.
    """
    check_family(family)
    _check_samples(trace)
    try:
        return _fitted(trace, name, family)
    except FitError as error:
        raise TraceError(f"{trace.provenance.source}: {error}; take another --family, or auto") from None


def _check_samples(trace: Trace) -> None:
    source, limit, lengths = trace.provenance.source, trace.provenance.max_new_tokens, trace.samples["response_tokens"]
    if len(trace) < _LEAST:
        raise TraceError(
            f"{source} has {len(trace)} samples; a fit needs {_LEAST} or more, `tailrace trace sample` draws from any"
        )
    if lengths.n_unique() == 1:
        raise TraceError(f"{source} has {lengths[0]} tokens in every response; a fit needs different lengths")
    if limit is not None and lengths.filter(lengths < limit).n_unique() < 2:
        raise TraceError(
            f"{source} ends nearly all responses at max_new_tokens, {limit}; a fit needs different lengths"
        )


def _fitted(trace: Trace, name: str, family: str) -> Parameters:
    samples, source = trace.samples, trace.provenance
    prompts = samples.group_by("step", "group", maintain_order=True).agg(pl.col("prompt_tokens").first())
    response, drift = _response(trace, family)
    return Parameters(
        tailrace_workload=FORMAT,
        name=name,
        about=f"fitted to {source.source}",
        rests_on=f"samples: {len(trace):,}, groups: {trace.groups:,}, steps: {len(trace.steps):,}",
        provenance=source,
        task=samples["task"][0] if samples["task"].n_unique() == 1 else None,
        prompt_tokens=choose(as_floats(prompts["prompt_tokens"]), family),
        response=response,
        drift=drift,
        reward_s=choose_known(samples["reward_s"], family),
        correct_share=_share(samples["reward"] > 0),
        kept_share=_share(samples["kept"]),
        prompt_figures=_figures(samples["prompt_tokens"]),
        response_figures=_figures(samples["response_tokens"]),
    )


def _response(trace: Trace, family: str) -> tuple[Single | Turns, Trend | Regime | None]:
    """Return the response, and the drift of single turns."""
    if has_turns(trace):
        return fit_turns(trace, family), None
    drift = fit_drift(trace.samples)
    offsets = trace.samples["step"] - trace.samples["step"].min()
    factors = [1.0 if drift is None else drift.factor(offset) for offset in offsets]
    level = pl.col("response_tokens") / pl.Series(factors)
    samples = numbered(trace).with_columns(level.alias("level"))
    return fit_single(samples, trace.provenance.max_new_tokens, family), drift


def _share(known: pl.Series) -> float | None:
    mean = known.mean()
    return None if mean is None else float(mean)  # type: ignore[arg-type]


def _figures(tokens: pl.Series) -> Figures:
    found = Distribution.of(tokens)
    assert found is not None, "a trace has samples"
    return Figures(
        mean=found.mean,
        deviation=found.deviation,
        p50=found.percentiles[50],
        p90=found.percentiles[90],
        p99=found.percentiles[99],
        most=found.most,
    )
