"""`tailrace trace export`: writes the trace of a run."""

from pathlib import Path

from tailrace.commands.files import check_apart, check_new_file
from tailrace.commands.trace_import import summary
from tailrace.registers import run_files
from tailrace.report.trace_sink import trace_of_run
from tailrace.workloads.files import check_name, write_trace

_OF_THE_RUN = (run_files.EVENTS, run_files.SAMPLES, run_files.WORKLOAD_TRACE, run_files.PLAYED_TRACE, run_files.JOBS)
"""Files of a run that end in .jsonl or .parquet, but for its exported trace."""


def trace_export(run_dir: Path, output: Path | None, *, force: bool = False) -> str:
    """Write the trace of the run in `run_dir`. Return a line about it.

    Args:
        output: by default `workload.parquet` in the run's directory, which is replaced.
        force: replace the output where it exists.

    Raises:
        UserError: it is not the directory of a run, no step has ended yet, or the output cannot be made.
    """
    if output is not None:
        check_name(output)
        check_new_file("--output", output, force=force)
        if output.is_file():
            check_apart("--output", output, [run_dir / name for name in _OF_THE_RUN])
    trace = trace_of_run(run_dir)
    written = output or run_dir / run_files.EXPORTED_TRACE
    write_trace(trace, written)
    return f"{written}: {summary(trace)}"
