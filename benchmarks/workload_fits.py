"""How near the workloads that ship come to their sources: p50, p90 and p99 of prompts and responses.

    python benchmarks/workload_fits.py DATA

prints a table, and ends with one JSON line. DATA, or TAILRACE_DATA, is a directory with PolyTrace's public data
(`polytrace/`) and the figures of its paper (`papers.csv`). Of programming the paper prints the mean and the standard
deviation alone, which are compared.
"""

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

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


def fit_error_pct(data: Path) -> dict[str, float]:
    """Return the worst error of each workload that ships, in percent of its source's figure."""
    worst = {}
    for name, trace in sources(data).items():
        worst[name] = max(each.worst for each in goodness(trace, open_workload(name)) if each.name in COMPARED)
    worst["code-14b"] = max(abs(error) for error in _moment_errors(programming(data)))
    return worst


def _moment_errors(true: Figures) -> Iterator[float]:
    assert true.deviation is not None, "the paper prints it"
    drawn = open_workload("code-14b").sample(steps=1, groups=200_000, group_size=1, seed=0).samples["response_tokens"]
    for stated, found in ((true.mean, drawn.to_numpy().mean()), (true.deviation, drawn.to_numpy().std())):
        yield 100 * (float(found) / stated - 1)


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
    for name, trace in sources(data).items():
        for each in goodness(trace, open_workload(name)):
            errors = "  ".join(f"p{part} {error:+6.1f} %" for part, error in each.errors.items())
            print(f"{name:<14} {each.name:<28} KS {each.ks:.3f}  {errors}")
    for moment, error in zip(("mean", "deviation"), _moment_errors(programming(data)), strict=True):
        print(f"{'code-14b':<14} response tokens, {moment:<12} {error:+.1f} %")
    worst = {name: round(error, 2) for name, error in fit_error_pct(data).items()}
    print(json.dumps({"workload_fit_error_pct": max(worst.values()), "by_workload": worst}))


if __name__ == "__main__":
    typer.run(main)
