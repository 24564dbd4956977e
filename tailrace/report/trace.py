"""The timeline of a run in Chrome's trace-event format, for Perfetto and chrome://tracing.

An actor of a worker is a process of the trace. Its spans lie on one thread, or on several where they overlap. A
response has a thread of its own for as long as it is generated. Counters show how many responses run and how fast they
grow, how busy a worker is, which weights it has, and the rows of the queue.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tailrace.events import Event
from tailrace.registers import run_files
from tailrace.registers.events import EventKind
from tailrace.report.lanes import assign_lanes
from tailrace.report.run_data import load_run, shown_step, write_file
from tailrace.report.workers import mark_text, row_name, row_of, row_order, weight_flights

TraceEvent = dict[str, Any]

_FIRST_THREAD, _FIRST_SAMPLE_THREAD = 1, 1001
"""Thread numbers; a viewer sorts by them, so that responses come below the other work of their actor."""


@dataclass(frozen=True, slots=True)
class _Span:
    """An event in whole microseconds, so that rounding cannot make two spans of a thread overlap."""

    start: int
    end: int
    event: Event


def write_trace(run_dir: Path) -> Path:
    """Write `trace.json` into the directory of a run and return its path.

    Raises:
        UserError: `run_dir` is not the directory of a run, or cannot be written.
    """
    trace = {"traceEvents": trace_events(load_run(run_dir).events), "displayTimeUnit": "ms"}
    return write_file(run_dir, run_files.TRACE, msgspec.json.encode(trace))


def trace_events(events: Sequence[Event]) -> list[TraceEvent]:
    """Return the trace events of a run: names, spans, instants and counters. Times are in microseconds."""
    by_row: dict[tuple[str, str], list[_Span]] = defaultdict(list)
    for event in (*events, *weight_flights(events)):
        by_row[row_of(event)].append(_in_microseconds(event))
    traced: list[TraceEvent] = []
    for pid, ((worker, actor), spans) in enumerate(sorted(by_row.items(), key=lambda row: row_order(*row[0])), 1):
        name = row_name(worker, actor)
        traced.append(_name("process_name", name, pid))
        traced.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
        traced.extend(_row_events(pid, name, spans))
    return traced


def _in_microseconds(event: Event) -> _Span:
    start = round(event.start * 1e6)
    return _Span(start, max(start, round(event.end * 1e6)), event)


def _row_events(pid: int, name: str, spans: Sequence[_Span]) -> Iterator[TraceEvent]:
    yield from (_instant(pid, span) for span in spans if span.event.about.mark)
    work = [span for span in spans if span.event.about.is_work]
    samples = [span for span in work if span.event.about.row == "responses"]
    others = [span for span in work if span.event.about.row != "responses"]
    yield from _threads(pid, _FIRST_THREAD, name, others)
    yield from _threads(pid, _FIRST_SAMPLE_THREAD, "responses", samples)
    yield from _response_counters(pid, samples)
    for span in spans:
        yield from _reported_counters(pid, span)


def _threads(pid: int, first: int, name: str, spans: Sequence[_Span]) -> Iterator[TraceEvent]:
    """Yield spans on as many threads as they need, numbered from `first`."""
    lanes = assign_lanes(spans)
    for lane in sorted(set(lanes)):
        tid = first + lane
        yield _name("thread_name", name if lane == 0 else f"{name} {lane + 1}", pid, tid)
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
    for span, lane in zip(spans, lanes, strict=True):
        yield _complete(pid, first + lane, span)


def _name(kind: str, name: str, pid: int, tid: int = 0) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _instant(pid: int, span: _Span) -> TraceEvent:
    scope = "g" if span.event.about.mark == "run" else "p"
    return {"ph": "i", "s": scope, "name": mark_text(span.event), "pid": pid, "tid": _FIRST_THREAD, "ts": span.start}


def _complete(pid: int, tid: int, span: _Span) -> TraceEvent:
    event = span.event
    name = event.task if event.step is None else f"{event.task} {shown_step(event)}"
    timed = {"pid": pid, "tid": tid, "ts": span.start, "dur": span.end - span.start}
    return {"ph": "X", "name": name, "cat": event.task, **timed, "args": _arguments(event)}


def _arguments(event: Event) -> dict[str, Any]:
    amounts = {name: getattr(event, name) for name in ("version", "samples", "tokens")}
    amounts = {"step": None if event.step is None else shown_step(event)} | amounts
    return {name: value for name, value in amounts.items() if value is not None} | event.metrics | event.info


def _response_counters(pid: int, samples: Iterable[_Span]) -> Iterator[TraceEvent]:
    """Yield counters of the running responses, and of tokens per second if each response grows evenly."""
    changes: dict[int, list[float]] = defaultdict(lambda: [0, 0.0])
    for span in samples:
        rate = (span.event.tokens or 0) / (span.end - span.start) * 1e6 if span.end > span.start else 0.0
        for at, sign in ((span.start, 1), (span.end, -1)):
            changes[at][0] += sign
            changes[at][1] += sign * rate
    running, tokens_per_s = 0.0, 0.0
    for at in sorted(changes):
        running += changes[at][0]
        tokens_per_s = tokens_per_s + changes[at][1] if running else 0.0
        yield _counter(pid, "running responses", at, running)
        yield _counter(pid, "tokens per second", at, round(max(0.0, tokens_per_s), 1))


def _reported_counters(pid: int, span: _Span) -> Iterator[TraceEvent]:
    """Yield the counters that a worker or the queue reports."""
    event = span.event
    if event.task == EventKind.ACTIVITY and span.end > span.start:
        yield _counter(pid, "busy (%)", span.start, round(100 * event.metrics["busy"] / (event.end - event.start), 1))
    elif event.about.gives_version:
        yield _counter(pid, "weight version", span.end, event.version or 0)
    elif event.task == EventKind.QUEUE:
        for name, value in event.metrics.items():
            yield _counter(pid, f"queue: {name}", span.end, value)


def _counter(pid: int, name: str, at: int, value: float) -> TraceEvent:
    return {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": at, "args": {"value": value}}
