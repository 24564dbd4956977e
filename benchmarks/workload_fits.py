"""How near the workloads that ship come to their sources: p50, p90 and p99 of prompts and responses.

    python benchmarks/workload_fits.py DATA

prints a table, and ends with one JSON line. DATA, or TAILRACE_DATA, is a directory with PolyTrace's public data
(`polytrace/`) and the figures of its paper (`papers.csv`). Of programming the paper prints the mean and the standard
deviation alone, which are compared.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import polars as pl
import typer

from tailrace.errors import TraceError
from tailrace.workloads.fits.goodness import goodness
from tailrace.workloads.importers.factory import import_trace
from tailrace.workloads.parameters import Figures
from tailrace.workloads.samplers.factory import open_workload
from tailrace.workloads.trace import Provenance, Trace

Data = Annotated[Path, typer.Argument(help="Directory of the data.", envvar="TAILRACE_DATA", exists=True)]
COMPARED = ("prompt tokens", "response tokens")
_SOURCE = "PolyTrace (Zhou-jiecheng/PolyTrace 4246156)"
_LAST_FILTERED = 3
"""The filter's records of later steps are of another run than the lengths."""


class Fit(NamedTuple):
    """How near a workload comes to its source in one amount."""

    workload: str
    amount: str
    errors: Mapping[str, float]
    """In percent, by figure."""
    ks: float | None
    """The Kolmogorov-Smirnov statistic; None where the source has no samples."""


def sources(data: Path) -> Mapping[str, Trace]:
    """Return the traces that the workloads are fitted to, by the names of the workloads."""
    polytrace = data / "polytrace"
    fits = [polytrace / "task_distribution_parameters.json"]
    return {
        "math-32b": _until_filtered(_trace(polytrace / "dapo_math_32b", "Qwen2.5-32B", "DAPO")),
        "video-7b": _trace(polytrace / "video_7b", "7B", max_new_tokens=16000),
        "search-7b": _trace(polytrace / "search_r1_7b", "Qwen2.5-7B", context=7096),
        "math-235b": import_trace(fits, _provenance("235B", max_new_tokens=32000), format="polytrace-math"),
        "tool-use-235b": import_trace(fits, _provenance("235B"), format="polytrace-tools"),
    }


def programming(data: Path) -> Figures:
    """Return what the paper prints of DeepCoder-14B (section 3.4, figure 16)."""
    with (data / "papers.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == "DeepCoder-14B"]
    values = {row["quantity"]: float(row["value"]) for row in rows}
    return Figures(mean=values["output length, mean"], deviation=values["output length, standard deviation"])


def fits(data: Path) -> Iterator[Fit]:
    """Yield what is compared of each workload that ships."""
    for name, trace in sources(data).items():
        for each in goodness(trace, open_workload(name)):
            errors = {f"p{part}": error for part, error in each.errors.items()}
            yield Fit(name, each.name, errors, each.ks)
    yield Fit("code-14b", "response tokens", _moment_errors(programming(data)), ks=None)


def fit_error_pct(compared: Iterable[Fit]) -> dict[str, float]:
    """Return the worst error of each workload in prompts and responses, in percent of its source's figure."""
    worst: dict[str, float] = {}
    for fit in compared:
        if fit.amount in COMPARED:
            worst[fit.workload] = max(worst.get(fit.workload, 0.0), *map(abs, fit.errors.values()))
    return worst


def _moment_errors(true: Figures) -> dict[str, float]:
    assert true.deviation is not None, "the paper prints it"
    drawn = open_workload("code-14b").sample(steps=1, groups=200_000, group_size=1, seed=0).samples["response_tokens"]
    tokens = drawn.to_numpy()
    return {
        "mean": 100 * (float(tokens.mean()) / true.mean - 1),
        "deviation": 100 * (float(tokens.std()) / true.deviation - 1),
    }


def _provenance(model: str, algorithm: str = "", **limits: int) -> Provenance:
    return msgspec.structs.replace(Provenance(source=_SOURCE, model=model, algorithm=algorithm), **limits)


def _trace(folder: Path, model: str, algorithm: str = "", **limits: int) -> Trace:
    files = sorted(folder.glob("*.jsonl*"))
    if not files:
        raise TraceError(f"{folder} has no files; name a directory with PolyTrace's public data")
    return import_trace(files, _provenance(model, algorithm, **limits))


def _until_filtered(trace: Trace) -> Trace:
    known = pl.when(pl.col("step") <= _LAST_FILTERED).then("kept")
    return Trace.of(trace.samples.with_columns(kept=known), trace.provenance)


def main(data: Data) -> None:
    """Print the errors of each workload, and the worst one as a JSON line."""
    compared = list(fits(data))
    for fit in compared:
        errors = "  ".join(f"{figure} {error:+6.1f} %" for figure, error in fit.errors.items())
        ks = "" if fit.ks is None else f"KS {fit.ks:.3f}  "
        print(f"{fit.workload:<14} {fit.amount:<28} {ks}{errors}")
    worst = {name: round(error, 2) for name, error in fit_error_pct(compared).items()}
    print(json.dumps({"workload_fit_error_pct": max(worst.values()), "by_workload": worst}))


if __name__ == "__main__":
    typer.run(main)
