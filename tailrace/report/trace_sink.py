"""A sink that writes the trace of a run while it goes on, as JSON lines.

A step's samples are appended when the next step has ended: by then the events of all workers have come. An attempt that
goes on from a checkpoint first writes the file anew, without the samples of lost work.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tailrace.errors import UserError
from tailrace.events import Event, owner_only
from tailrace.registers import run_files
from tailrace.registers.events import EventKind
from tailrace.report.run_data import load_run
from tailrace.workloads.files import header_line, line_of
from tailrace.workloads.run_trace import RunSamples, run_provenance, trace_of_events
from tailrace.workloads.trace import Trace


def trace_of_run(run_dir: Path) -> Trace:
    """Return the trace of the run in `run_dir`.

    Raises:
        UserError: it is not the directory of a run, a file of it is broken, or no step has ended yet.
    """
    run = load_run(run_dir)
    return trace_of_events(run.name, run.events)


class TraceSink:
    """Appends the samples of a run to its trace. The sink of `events.jsonl` must come before it."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._path = run_dir / run_files.WORKLOAD_TRACE
        self._samples = RunSamples()

    def __call__(self, event: Event) -> None:
        """Take an event; write the samples that it shows to be complete.

        Raises:
            UserError: the file cannot be written.
        """
        if event.task == EventKind.RUN:
            self._begin()
            return
        self._samples.add(event)
        if event.task == EventKind.STEP and event.step is not None:
            self._append(self._samples.take(before_step=event.step))

    def close(self) -> None:
        """Write the samples of the last step that has ended.

        Raises:
            UserError: the file cannot be written.
        """
        if rows := self._samples.take(before_step=self._samples.ended_steps):
            self._append(rows)

    def _begin(self) -> None:
        """Write the file as of the events so far, for another attempt: samples of unfinished steps wait."""
        run = load_run(self._run_dir)
        self._samples = RunSamples()
        for event in run.events:
            self._samples.add(event)
        rows = self._samples.take(before_step=run.info["trained_steps"])
        self._write(header_line(run_provenance(run.name, run.events)), rows, mode="wb")

    def _append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._write(b"", rows, mode="ab")

    def _write(self, header: bytes, rows: Iterable[Mapping[str, Any]], *, mode: str) -> None:
        try:
            with open(self._path, mode, opener=owner_only) as file:
                file.write(b"".join([header, *map(line_of, rows)]))
        except OSError as error:
            raise UserError(
                f"{self._path} cannot be written: {error.strerror}; mend that, then go on with --resume"
            ) from None
