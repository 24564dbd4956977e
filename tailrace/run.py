"""One training run: from a configuration to a directory with a trained model and a report.

    inputs ──▶ parts ──▶ directory, log, display ──▶ pipeline ──▶ exported model, report, trace

Everything that can be wrong with the input is found before the directory is made. Ctrl-C (or SIGTERM) cancels the
pipeline, saves a checkpoint and exits; a second one exits at once.
"""

import asyncio
import os
import platform
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

import tailrace
from tailrace.assembly import Inputs, Parts, build_pipeline, load_inputs, open_parts, prepare_torch
from tailrace.checkpointing import read_run_state
from tailrace.config.run import RunConfig
from tailrace.errors import CheckpointError, NonFiniteError, TailraceError
from tailrace.events import Event, EventLog, Sink
from tailrace.metrics import TaskTimes
from tailrace.pipeline import Pipeline
from tailrace.report.display import Display
from tailrace.report.page import write_report
from tailrace.report.sinks import open_sinks
from tailrace.report.trace import write_trace
from tailrace.run_directory import RunDirectory
from tailrace.trainer.checkpoint import CheckpointStore

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Where a run goes on: a verified checkpoint."""

    checkpoint: Path
    elapsed_s: float
    trained_steps: int
    next_step: int


def train(config: RunConfig, *, resume: bool, checkpoint: Path | None = None) -> int:
    """Train, export, report; the exit code: 0, or 130 when interrupted.

    `resume`: go on from `checkpoint`, by default the newest one of `config.output_dir`.

    Raises:
        UserError: something about the input is wrong; nothing was written.
        TailraceError: the run failed; its last checkpoint is there.
    """
    directory = RunDirectory(Path(config.output_dir))
    store = CheckpointStore(directory.checkpoints, keep=config.checkpoint.keep)
    start = _find_start(config, directory, store, checkpoint) if resume else None
    if start is None:
        directory.check_new()
    prepare_torch(config)
    inputs = load_inputs(config)
    return asyncio.run(_run(config, inputs, directory, store, start))


def _find_start(config: RunConfig, directory: RunDirectory, store: CheckpointStore, checkpoint: Path | None) -> Resume:
    directory.check_same(config)
    path = checkpoint or store.latest()
    if path is None:
        raise CheckpointError(f"output_dir {directory.path} holds no checkpoint; start again in a new output_dir")
    store.verify(path)
    state = read_run_state(path)
    return Resume(
        checkpoint=path, elapsed_s=state.elapsed_s, trained_steps=state.trained_steps, next_step=state.next_step
    )


async def _run(
    config: RunConfig, inputs: Inputs, directory: RunDirectory, store: CheckpointStore, start: Resume | None
) -> int:
    async with AsyncExitStack() as stack:
        parts = await open_parts(config, inputs, stack)
        stack.enter_context(directory.opened(config))
        times = TaskTimes()
        log = _open_log(config, directory, start, times, stack)
        pipeline, feeder, checkpointer = build_pipeline(config, inputs, parts, store, log, times)
        if start is not None:
            await checkpointer.load(start.checkpoint)
            pipeline.trained_steps, feeder.next_step = start.trained_steps, start.next_step
            await pipeline.update_weights()
        if await _train(pipeline, parts, directory):
            return _say_interrupted(directory)
        await _export(parts, directory, log)
    return _finish(directory)


def _open_log(
    config: RunConfig, directory: RunDirectory, start: Resume | None, times: TaskTimes, stack: AsyncExitStack
) -> EventLog:
    display = stack.enter_context(Display())
    resolved = config.model_dump(mode="json")
    others = open_sinks(config.observe, directory.path, resolved)
    for sink in others:
        stack.callback(sink.close)
    sinks: tuple[Sink, ...] = (times, display, *others)
    log = EventLog(directory.events, sinks=sinks, offset=start.elapsed_s if start else 0.0)
    stack.callback(log.close)
    info = {
        "config": resolved,
        "tailrace": tailrace.__version__,
        "resumed_from": str(start.checkpoint) if start else None,
        "total_steps": config.trainer.steps,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
    }
    log.emit(Event(task="run", actor="driver", start=log.now(), end=log.now(), info=info))
    return log


async def _train(pipeline: Pipeline, parts: Parts, directory: RunDirectory) -> bool:
    """Run the pipeline; True when it was interrupted, and saved."""
    training = asyncio.create_task(pipeline.run())
    with _cancelled_by_signals(training):
        try:
            await training
        except asyncio.CancelledError:
            await pipeline.save()
            return True
        except BaseExceptionGroup as group:
            error = _first_error(group)
            if isinstance(error, NonFiniteError):
                directory.evidence.write_bytes(msgspec.json.encode(parts.trainer.evidence()))
                raise NonFiniteError(f"{error}; the evidence is in {directory.evidence}") from error
            raise error from None
    return False


@contextmanager
def _cancelled_by_signals(training: asyncio.Task[None]) -> Iterator[None]:
    """The first SIGINT or SIGTERM cancels `training`, a second one ends the process at once."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if training.cancelled() or training.cancelling():
            os._exit(INTERRUPTED)
        training.cancel()

    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to show of a failed task group: one raised on purpose before any other."""
    leaves = list(_leaves(group))
    return next((leaf for leaf in leaves if isinstance(leaf, TailraceError)), leaves[0])


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


async def _export(parts: Parts, directory: RunDirectory, log: EventLog) -> None:
    with log.span("export", "trainer", info={"path": str(directory.model)}):
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(parts.executor, lambda: parts.trainer.export(directory.model))


def _finish(directory: RunDirectory) -> int:
    report = write_report(directory.path)
    write_trace(directory.path)
    print(f"Report: {report}\nModel:  {directory.model}")
    return 0


def _say_interrupted(directory: RunDirectory) -> int:
    print(f"Interrupted and saved. Go on with: tailrace train {directory.config} --resume")
    return INTERRUPTED
