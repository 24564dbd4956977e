"""One training run: from a configuration to a directory with a trained model and a report.

    inputs ──▶ parts ──▶ directory, queue, log, display ──▶ pipeline ──▶ exported model, report, trace

Everything that can be wrong with the input is found before the directory is made. Ctrl-C (or SIGTERM) cancels the
pipeline, saves a checkpoint and exits; a second one exits at once.
"""

import asyncio
import os
import platform
import sys
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

import tailrace
from tailrace.algorithms.factory import make_algorithm
from tailrace.assembly import Colocated, Inputs, Placement, load_inputs
from tailrace.checkpointing import RunState, check_prompts, read_run_state, restore_queue
from tailrace.cluster.pool import DeathBudget
from tailrace.config.run import RunConfig
from tailrace.config.transfer import RemoteQueueConfig
from tailrace.errors import CheckpointError, NonFiniteError, QueueError, WorkerDied, first_error
from tailrace.events import Event, EventFile, EventLog, Sink
from tailrace.interrupt import INTERRUPTED, Interrupt
from tailrace.learner import Learner
from tailrace.metrics import TaskTimes
from tailrace.pipeline import Pipeline
from tailrace.preparation import prepare_torch
from tailrace.report.display import Display
from tailrace.report.page import write_report
from tailrace.report.sinks import check_sinks, open_sinks
from tailrace.report.trace import write_trace
from tailrace.run_directory import RunDirectory
from tailrace.run_queue import check_queue, explained, open_queue, run_table
from tailrace.separated import Separated
from tailrace.trainer.checkpoint import CheckpointStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Where a run goes on: a verified checkpoint."""

    checkpoint: Path
    state: RunState


def train(
    config: RunConfig, *, resume: bool, checkpoint: Path | None = None, interrupt: Interrupt | None = None
) -> int:
    """Train, export, report; the exit code: 0, or 130 when interrupted.

    `resume`: go on from `checkpoint`, by default the newest one of `config.output_dir`. `interrupt`: what stops it,
    beside signals.

    Raises:
        UserError: something about the input is wrong, and nothing was written; or a checkpoint, or the directory of a
            queue in processes of its own, cannot be written.
        TailraceError: the run failed. Its last checkpoint is there.
    """
    directory = RunDirectory(Path(config.output_dir))
    store = CheckpointStore(directory.checkpoints, keep=config.checkpoint.keep)
    with ExitStack() as stack:
        start = None
        if resume:
            directory.check_same(config)
            stack.enter_context(directory.locked())
            start = _find_start(directory, store, checkpoint)
        else:
            directory.check_new()
        check_sinks(config.observe)
        if config.pipeline.placement == "colocated":
            prepare_torch(config.device, config.threads)
        check_queue(config.queue, run_table(config, make_algorithm(config.algorithm)))
        inputs = load_inputs(config)
        try:
            return asyncio.run(_run(config, inputs, directory, store, start, interrupt or Interrupt()))
        except asyncio.CancelledError:
            print("Interrupted; there was nothing new to save.")
            return INTERRUPTED
        except QueueError as error:
            if not isinstance(config.queue, RemoteQueueConfig):
                raise
            explanation = explained(error, config.queue.connection, directory.config, store.latest())
            if explanation is None:
                raise
            raise explanation from error


def _find_start(directory: RunDirectory, store: CheckpointStore, checkpoint: Path | None) -> Resume:
    path = checkpoint or store.latest()
    if path is None:
        raise CheckpointError(f"output_dir {directory.path} holds no checkpoint; start again in a new output_dir")
    store.verify(path)
    return Resume(checkpoint=path, state=read_run_state(path))


async def _run(
    config: RunConfig,
    inputs: Inputs,
    directory: RunDirectory,
    store: CheckpointStore,
    start: Resume | None,
    interrupt: Interrupt,
) -> int:
    if start is not None:
        check_prompts(start.state, inputs.prompts.fingerprint)
    budget = DeathBudget(config.cluster.max_deaths)
    with ExitStack() as stack:
        stack.enter_context(interrupt.watching())
        run = _Run(config, inputs, directory, store, interrupt, budget)
        locked = None if start is not None else stack
        code = await run.attempt(start, locked)
        while code is None:
            code = await run.attempt(run.newest(), None, again=True)
    if code == 0:
        report = write_report(directory.path)
        write_trace(directory.path)
        print(f"Report: {report}\nModel:  {directory.model}")
    return code


@dataclass(frozen=True, slots=True)
class _Run:
    """One run; where its trainer dies, several attempts at it, each from the newest checkpoint."""

    config: RunConfig
    inputs: Inputs
    directory: RunDirectory
    store: CheckpointStore
    interrupt: Interrupt
    budget: DeathBudget

    async def attempt(self, start: Resume | None, lock: ExitStack | None, *, again: bool = False) -> int | None:
        """Train to the end; the exit code, or None where the trainer died and another attempt is to be made.

        `lock`: holds the run's directory from here on, where it is a new one. `again`: workers have been able to start
        before, so that one that dies while it starts is no sign that it never can.
        """
        async with AsyncExitStack() as stack:
            placement = self._placement()
            await placement.open(stack)
            if lock is not None:
                lock.enter_context(self.directory.locked())
                self.directory.check_new()  # again: another process may have been faster
            begun = again
            try:
                pipeline = await self._connect(placement, start, stack)
                begun = True
                if not await _train(pipeline, self.directory, self.interrupt):
                    print(f"Interrupted and saved. Go on with: tailrace train {self.directory.config} --resume")
                    return INTERRUPTED
                await pipeline.learner.export(self.directory.model)
            except WorkerDied as death:
                if not begun:
                    raise
                if self.interrupt.asked:
                    print(f"{death}; since the last checkpoint, nothing could be saved.", file=sys.stderr)
                    return INTERRUPTED
                self._go_on_after(death)
                return None
        return 0

    def newest(self) -> Resume | None:
        """Where to go on; None at the beginning."""
        latest = self.store.latest()
        return None if latest is None else _find_start(self.directory, self.store, latest)

    def _placement(self) -> Placement:
        config = self.config
        if config.pipeline.placement == "colocated":
            return Colocated(config, self.inputs)
        return Separated(config, self.inputs, self.budget)

    async def _connect(self, placement: Placement, start: Resume | None, stack: AsyncExitStack) -> Pipeline:
        config, directory = self.config, self.directory
        table = run_table(config, make_algorithm(config.algorithm))
        queue = await open_queue(config.queue, table, directory.queue, stack)
        if start is not None:
            await restore_queue(start.checkpoint, queue.queue)
        with directory.begun(config):
            log = _open_log(config, directory, start, stack)
            pipeline = await placement.connect(queue, self.store, log, stack)
        if start is not None:
            await pipeline.resume_at(start.checkpoint, start.state)
        return pipeline

    def _go_on_after(self, death: WorkerDied) -> None:
        """See that another attempt may be made.

        Raises:
            WorkerDied: it may not, since the queue that has served this one is not the run's to begin anew.
            ClusterError: too many workers have died.
        """
        if isinstance(self.config.queue, RemoteQueueConfig):
            raise death
        self.budget.spend(death)
        latest = self.store.latest()
        where = "from the beginning" if latest is None else f"from {latest}"
        print(f"{death}; the run goes on {where}.", file=sys.stderr)


def _open_log(config: RunConfig, directory: RunDirectory, start: Resume | None, stack: AsyncExitStack) -> EventLog:
    display = stack.enter_context(Display())
    resolved = config.model_dump(mode="json")
    others = open_sinks(config.observe, directory.path, resolved)
    for sink in others:
        stack.callback(sink.close)
    file = EventFile(directory.events)
    stack.callback(file.close)
    sinks: tuple[Sink, ...] = (TaskTimes(), file, display, *others)
    log = EventLog(sinks=sinks, offset=start.state.elapsed_s if start else 0.0)
    info = {
        "config": resolved,
        "tailrace": tailrace.__version__,
        "resumed_from": str(start.checkpoint) if start else None,
        "total_steps": config.trainer.steps,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
    }
    log.emit(Event(task="run", actor="driver", start=log.now(), end=log.now(), info=info))
    return log


async def _train(pipeline: Pipeline, directory: RunDirectory, interrupt: Interrupt) -> bool:
    """Run the pipeline to its end; False when it was interrupted, and saved."""
    try:
        await pipeline.run()
    except (asyncio.CancelledError, BaseExceptionGroup) as error:
        if interrupt.asked:
            interrupt.accept()
            await pipeline.save()
        if isinstance(error, BaseExceptionGroup):
            raise await _explained(first_error(error), pipeline.learner, directory) from error
        if not interrupt.asked:
            raise
        return False
    return True


async def _explained(error: BaseException, learner: Learner, directory: RunDirectory) -> BaseException:
    """The error to raise; a step that stayed non-finite leaves its evidence in the run's directory."""
    if not isinstance(error, NonFiniteError):
        return error
    try:
        directory.evidence.write_bytes(msgspec.json.encode(await learner.evidence()))
    except OSError as problem:
        return NonFiniteError(f"{error}; its evidence could not be written: {problem.strerror}")
    return NonFiniteError(f"{error}; the evidence is in {directory.evidence}")
