"""The first and the last event of a run's log."""

import asyncio
import os
import platform

import torch

import tailrace
from tailrace.config.run import RunConfig
from tailrace.config.written import shown
from tailrace.errors import one_line
from tailrace.events import Event, EventLog, Sink
from tailrace.registers.events import EventKind
from tailrace.run.learning_watch import LearningWatch
from tailrace.run.resume import Resume
from tailrace.run.step_metrics import Spending, TaskTimes
from tailrace.run.worker_metrics import WorkerMetrics


def begin_log(config: RunConfig, start: Resume | None, sinks: tuple[Sink, ...], *, total_steps: int | None) -> EventLog:
    """Begin the log of one attempt. Its clock goes on from the time at which `start` was saved.

    `total_steps`: the number of steps to train, where it is known.
    """
    watch = LearningWatch(config, sinks)
    log = EventLog(
        sinks=(TaskTimes(), Spending(), WorkerMetrics(), *sinks, watch), offset=start.state.elapsed_s if start else 0.0
    )
    info = {
        "config": shown(config.resolved),
        "tailrace": tailrace.__version__,
        "resumed_from": str(start.checkpoint) if start else None,
        "trained_steps": start.state.trained_steps if start else 0,
        "total_steps": total_steps,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
    }
    log.emit(Event(task=EventKind.RUN, actor="driver", start=log.now(), end=log.now(), info=info))
    return log


def end_event(log: EventLog, error: BaseException | None, *, finished: bool) -> Event:
    """Make the event that says how a run has ended: `how` is finished, interrupted or failed; `error` is the reason."""
    info = {"how": "finished" if finished else "interrupted"}
    if not (finished or error is None or isinstance(error, asyncio.CancelledError | KeyboardInterrupt)):
        info = {"how": "failed", "error": one_line(error)}
    return Event(task=EventKind.END, actor="driver", start=log.now(), end=log.now(), info=info)
