"""`make bench-workloads`: replays beside real runs, shipped workloads beside their sources, and what tracing costs.

The last line is JSON:

    replay_error_pct         a replay's end-to-end latency beside that of its run: the worst mode's median over pairs
    fit_error_pct            p50, p90 and p99 of the workloads that ship beside their sources: the worst
    breakdown_overhead_pct   CPU seconds of the breakdown of time and memory, of those of its steps
    import_rows_per_s        samples of packed lengths that are imported in a second

The sources are PolyTrace's public data, in the folder TAILRACE_DATA.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from gate import output_of
from workload_fits import fit_error_pct, fits
from workload_import import import_rows_per_s
from workload_replay import LIMIT_S, replay_differences_pct, replay_figures

HERE = Path(__file__).parent


def main(
    data: Annotated[Path, typer.Argument(help="The folder of the data.", envvar="TAILRACE_DATA", exists=True)],
    pairs: Annotated[int, typer.Option(min=1, help="Real runs and their replays, of each mode.")] = 5,
    steps: Annotated[int, typer.Option(min=2, help="Steps of a run.")] = 12,
) -> None:
    """Measure all of it, and print the figures."""
    rows = import_rows_per_s()
    errors = fit_error_pct(fits(data))
    replays = replay_figures(replay_differences_pct(pairs=pairs, steps=steps))
    figures = {
        "bench": "workloads",
        "replay_error_pct": replays.pop("replay_error_pct"),
        "fit_error_pct": round(max(errors.values()), 2),
        "breakdown_overhead_pct": _breakdown()["breakdown_overhead_pct"],
        "import_rows_per_s": round(rows),
        **replays,
        "fit_error_pct_by_workload": {name: round(error, 2) for name, error in errors.items()},
    }
    print(json.dumps(figures))


def _breakdown() -> dict[str, Any]:
    """The figures of the breakdown's own benchmark, which changes functions of its process."""
    output = output_of([sys.executable, str(HERE / "breakdown_overhead.py")], timeout_s=LIMIT_S)
    figures: dict[str, Any] = json.loads(output.splitlines()[-1])
    return figures


if __name__ == "__main__":
    typer.run(main)
