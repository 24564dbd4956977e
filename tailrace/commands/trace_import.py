"""`tailrace trace import`: reads the trace of another program, and writes it as one of Tailrace's."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import polars as pl

from tailrace.commands.files import check_apart, check_new_file
from tailrace.errors import counted
from tailrace.workloads.files import check_name, write_trace
from tailrace.workloads.importers.factory import import_trace
from tailrace.workloads.trace import Provenance, Trace


def trace_import(
    files: Sequence[Path],
    output: Path,
    provenance: Provenance,
    *,
    format: str | None = None,
    task: str | None = None,
    force: bool = False,
) -> str:
    """Import files as one trace and write it. Return a line about it.

    Args:
        format: see `import_trace`.
        task: the kind of task of all samples.
        force: replace the output where it exists.

    Raises:
        UserError: a file is not of the format, or the output cannot be made. Nothing is written.
    """
    check_name(output)
    check_new_file("--output", output, force=force)
    if output.is_file():
        check_apart("--output", output, files)
    trace = import_trace(files, provenance, format=format)
    if task is not None:
        trace = replace(trace, samples=trace.samples.with_columns(pl.lit(task).alias("task")))
    write_trace(trace, output)
    return f"{output}: {summary(trace)}"


def names_of(files: Sequence[Path]) -> str:
    """Name the files that a trace is made of: the first, and how many more."""
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{files[0].name}{more}"


def summary(trace: Trace) -> str:
    """Say how much a trace holds."""
    if trace.provenance.is_service:
        return f"{counted(len(trace), 'request')} of a service"
    return (
        f"{counted(len(trace), 'sample')} in {counted(trace.groups, 'group')} and {counted(len(trace.steps), 'step')}"
    )
