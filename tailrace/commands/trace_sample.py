"""`tailrace trace sample` draws a trace from a workload; `tailrace trace workloads` lists those that ship."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from tailrace.commands.files import check_apart, check_new_file
from tailrace.commands.trace_import import summary
from tailrace.report.text import number
from tailrace.workloads.files import check_name, write_trace
from tailrace.workloads.samplers.factory import library, open_workload


def trace_sample(
    workload: str, output: Path, *, steps: int, groups: int, group_size: int, seed: int, force: bool = False
) -> str:
    """Draw a trace and write it. Return a line about it.

    Args:
        workload: see `open_workload`.
        steps: and the following three, see `Workload.sample`.
        force: replace the output where it exists.

    Raises:
        UserError: there is no such workload, or the output cannot be made. Nothing is written.
    """
    check_name(output)
    check_new_file("--output", output, force=force)
    if output.is_file():
        check_apart("--output", output, [workload])
    trace = open_workload(workload).sample(steps=steps, groups=groups, group_size=group_size, seed=seed)
    write_trace(trace, output)
    return f"{output}: {summary(trace)}"


def show_library() -> None:
    """Print the workloads that ship, with the response tokens of their sources."""
    table = Table(box=None, pad_edge=False, header_style="")
    for heading in ("workload", "mean", "p50", "p90", "p99", "about"):
        table.add_column(
            heading, justify="left" if heading in ("workload", "about") else "right", no_wrap=heading != "about"
        )
    for name, parameters in library().items():
        figures = parameters.response_figures
        shown = [figures.mean, figures.p50, figures.p90, figures.p99]
        table.add_row(name, *("" if value is None else number(round(value)) for value in shown), parameters.about)
    print("Response tokens of the sources:")
    Console().print(table)
