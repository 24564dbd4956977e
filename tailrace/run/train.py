"""Training runs: a configuration becomes a directory with a trained model and a report.

    inputs ──▶ parts ──▶ directory, queue, log, display ──▶ pipeline ──▶ exported model, report, trace

All errors of the input are found before anything is started. A start that is refused leaves no file. Ctrl-C (or
SIGTERM, or a terminal that closes) cancels the pipeline, saves a checkpoint and exits; a second one exits at once.
"""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, closing, contextmanager, suppress
from enum import Enum
from pathlib import Path

import msgspec

from tailrace.config.run import RunConfig
from tailrace.config.transfer import RemoteQueueConfig
from tailrace.config.written import shown
from tailrace.errors import (
    CheckpointError,
    ClusterError,
    ClusterLost,
    NonFiniteError,
    QueueError,
    TailraceError,
    UserError,
    WorkerDied,
    first_error,
)
from tailrace.events import EventFile, EventLog, Sink
from tailrace.host.interrupt import INTERRUPTED, Interrupt
from tailrace.host.streams import outliving_readers, unencodable_replaced
from tailrace.prompts.load import tell_dropped
from tailrace.registers import run_files
from tailrace.report.display import Display
from tailrace.report.page import write_report
from tailrace.report.samples import SampleFile
from tailrace.report.sinks import open_sinks
from tailrace.report.trace import write_trace
from tailrace.run.checkpoint import check_prompts, restore_queue
from tailrace.run.checks import check_recipe
from tailrace.run.colocated import Colocated
from tailrace.run.directory import RunDirectory
from tailrace.run.inputs import Inputs
from tailrace.run.log import begin_log, end_event
from tailrace.run.parts import Placement
from tailrace.run.pipeline import Pipeline
from tailrace.run.queue import explained, open_queue, run_table
from tailrace.run.resume import Restarts, Resume, find_start
from tailrace.run.separated import Separated
from tailrace.trainer.checkpoint import CheckpointStore, remove_leftovers


class _Stage(Enum):
    """How far a run has come, over all attempts. It only moves forward: STARTING, TRAINING, EXPORTED."""

    STARTING = "starting"
    """No attempt has started all its workers: one that dies now may never be able to start."""
    TRAINING = "training"
    EXPORTED = "exported"
    """The trained model is written; only the closing and the report are left."""


@outliving_readers()
def train(
    config: RunConfig,
    *,
    resume: bool,
    checkpoint: Path | None = None,
    interrupt: Interrupt | None = None,
    prompts: bytes | None = None,
    played: bytes | None = None,
) -> int:
    """Train, export and report. Returns the exit code: 0, or 130 when interrupted.

    `resume`: go on from `checkpoint`, by default the newest of the run in `config.output_dir`. Where no run is there, a
    new one begins with `checkpoint`, which is another run's. `interrupt`: stops the run, as signals do. `prompts`: the
    contents of `prompts.source`, where a program gives them. `played`: the contents of `pipeline.replay`, where a
    benchmark gives them. A benchmark trains nothing worth keeping: it saves no checkpoint and exports no model.

    Raises:
        UserError: something about the input is wrong, and nothing is left of the start; or a checkpoint cannot be
            written.
        TailraceError: the run failed. Its last checkpoint is there.
    """
    directory = RunDirectory(Path(config.output_dir))
    store = CheckpointStore(directory.checkpoints, config.checkpoint.keep, config.checkpoint.keep_best)
    try:
        with unencodable_replaced(), ExitStack() as stack:
            if resume:
                directory.check_resumed(config, checkpoint)
            stack.enter_context(directory.locked())
            if not (resume and directory.config.exists()):
                directory.check_new()
            start = None
            if resume:
                start = find_start(directory, store, checkpoint)
                directory.check_events()
            stack.enter_context(directory.holding(prompts))
            stack.enter_context(directory.holding(played, run_files.PLAYED_TRACE))
            stack.enter_context(directory.holding(directory.plan_given(config), run_files.PLAN))
            inputs = check_recipe(config)
            tell_dropped(inputs.prompts.dropped)
            if start is not None:
                check_prompts(start.state, inputs.prompts.fingerprint)
            is_kept = played is None
            run = _Run(config, inputs, directory, store, start, interrupt or Interrupt(), is_kept=is_kept)
            return asyncio.run(run.to_end())
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


class _Run:
    """A run. When its trainer dies, another attempt starts from the newest checkpoint that the run has saved.

    A checkpoint that is damaged by then is skipped with a message.
    """

    def __init__(
        self,
        config: RunConfig,
        inputs: Inputs,
        directory: RunDirectory,
        store: CheckpointStore,
        start: Resume | None,
        interrupt: Interrupt,
        *,
        is_kept: bool,
    ) -> None:
        """`is_kept`: whether its weights are kept: in checkpoints, and at its end."""
        self._is_kept = is_kept
        self._config = config
        self._inputs = inputs
        self._directory = directory
        self._store = store
        self._interrupt = interrupt
        self._restarts = Restarts(config, store, start)
        self._stage = _Stage.STARTING
        self._sinks: tuple[Sink, ...] = ()
        self._log: EventLog | None = None
        """The log of the newest attempt."""

    @property
    def _begun(self) -> bool:
        return self._stage is not _Stage.STARTING

    @property
    def _finished(self) -> bool:
        return self._stage is _Stage.EXPORTED

    async def to_end(self) -> int:
        """Make attempts until one ends, then the report. Returns the exit code."""
        try:
            with self._interrupt.watching(), ExitStack() as stack, self._telling_its_end():
                while isinstance(end := await self._attempt(stack), ClusterError):
                    self._restarts.after(end)
                return end
        except asyncio.CancelledError:
            if self._finished:
                return 0  # only its closing was interrupted
            if not (self._begun and self._store.latest()):
                raise
            print(f"Interrupted. {self._how_to_go_on}")  # perhaps only the export is left
            return INTERRUPTED
        except TailraceError:
            if self._begun and not self._finished:
                self._tell_of_failure()
            raise
        finally:
            if self._finished:
                self._store.tidy()
                remove_leftovers(self._directory.path, self._directory.model.name)
            if self._log is not None and self._directory.events.exists():  # also after an error
                self._report()

    @contextmanager
    def _telling_its_end(self) -> Iterator[None]:
        """Emit an event `end` that says how the block has ended, for the report."""
        try:
            yield
        except BaseException as error:
            if self._log is not None:
                with suppress(UserError):  # a failed write may be the very error that has ended it
                    self._log.emit(end_event(self._log, error, finished=self._finished))
            raise
        if self._log is not None:
            self._log.emit(end_event(self._log, None, finished=self._finished))

    def _report(self) -> None:
        """Write report and trace, and print their paths. After a failed run, an error of writing is only printed."""
        try:
            report = write_report(self._directory.path)
            write_trace(self._directory.path)
        except UserError as error:
            if self._finished:
                raise
            print(error, file=sys.stderr)
            return
        print(f"Report: {report}")
        if self._finished and self._is_kept:
            print(f"Model:  {self._directory.model}")
        if (best := self._store.best()) is not None:
            path, figure = best
            print(f"Best:   {path} ({self._store.keep_best} {figure:.4g})")

    @property
    def _how_to_go_on(self) -> str:
        return f"Go on with: tailrace train {self._directory.config} --resume"

    def _tell_of_failure(self) -> None:
        """Print how to go on after a failure, before its error is shown."""
        if self._store.latest() and not isinstance(self._config.queue, RemoteQueueConfig):  # its error says more
            print(self._how_to_go_on, file=sys.stderr)

    async def _attempt(self, shared: ExitStack) -> int | ClusterError:
        """Train to the end.

        Returns the exit code, or the death of the trainer or of Ray, after which another attempt may be made.
        `shared`: takes the sinks, which all attempts share.
        """
        try:
            async with AsyncExitStack() as stack:  # the death is raised through it: errors of closing do not hide it
                placement = self._placement()
                await placement.open(stack)
                self._interrupt.handle_signals()  # Ray's would print a stack first
                pipeline = await self._connect(placement, stack, shared)
                self._stage = _Stage.TRAINING
                if not await _train(pipeline, self._directory, self._interrupt, saves=self._is_kept):
                    print(f"Interrupted and saved. {self._how_to_go_on}" if self._is_kept else "Interrupted.")
                    return INTERRUPTED
                if self._is_kept:
                    await pipeline.learner.export(self._directory.model)
                self._stage = _Stage.EXPORTED
        except (WorkerDied, ClusterLost) as death:
            if not self._begun:
                raise
            if self._interrupt.asked:
                print(f"{death}; since the last checkpoint, nothing could be saved.", file=sys.stderr)
                if self._store.latest():
                    print(f"Interrupted. {self._how_to_go_on}")
                return INTERRUPTED
            return death
        return 0

    def _placement(self) -> Placement:
        config = self._config
        if config.pipeline.placement == "colocated":
            return Colocated(config, self._inputs)
        return Separated(config, self._inputs, self._restarts.budget)

    async def _connect(self, placement: Placement, stack: AsyncExitStack, shared: ExitStack) -> Pipeline:
        config, directory, start = self._config, self._directory, self._restarts.point
        table = run_table(config)
        queue = await open_queue(config.queue, table, directory.queue, stack)
        if start is not None:
            await restore_queue(start.checkpoint, queue.queue)
        with directory.begun(config, resumed=start is not None and directory.config.exists()):
            self._sinks = self._sinks or _open_sinks(config, directory, shared)
            self._log = begin_log(config, start, self._sinks, total_steps=config.trainer.steps)
            pipeline = await placement.connect(queue, self._store, self._log, stack)
        if start is not None:
            await pipeline.resume_at(start.checkpoint, start.state)
        self._store.go_on_from(start.checkpoint if start else None)
        return pipeline


def _open_sinks(config: RunConfig, directory: RunDirectory, stack: ExitStack) -> tuple[Sink, ...]:
    """Open the sinks of a run's events, which all its attempts share."""
    display = stack.enter_context(Display())
    others = open_sinks(config.observe, directory.path, shown(config.resolved))
    for sink in others:
        stack.callback(sink.close)
    return (stack.enter_context(closing(EventFile(directory.events))), SampleFile(directory.samples), display, *others)


async def _train(pipeline: Pipeline, directory: RunDirectory, interrupt: Interrupt, *, saves: bool) -> bool:
    """Run the pipeline to its end; False when it was interrupted and, where the run `saves` at all, saved."""
    try:
        await pipeline.run(saves=saves)
    except (asyncio.CancelledError, BaseExceptionGroup) as error:
        if interrupt.asked:
            interrupt.accept()
            try:
                if saves:
                    await pipeline.save()
            except CheckpointError as unsaved:
                if isinstance(error, asyncio.CancelledError):
                    raise
                print(unsaved, file=sys.stderr)  # the error that has ended the run follows
        if isinstance(error, BaseExceptionGroup):
            raise await _explained(first_error(error), pipeline, directory) from error
        if not interrupt.asked:
            raise
        return False
    return True


async def _explained(error: BaseException, pipeline: Pipeline, directory: RunDirectory) -> BaseException:
    """The error to raise. A step that stayed non-finite leaves its evidence in the run's directory."""
    if not isinstance(error, NonFiniteError):
        return error
    try:
        directory.evidence.write_bytes(msgspec.json.encode(await pipeline.evidence()))
    except OSError as problem:
        return NonFiniteError(f"{error}; its evidence could not be written: {problem.strerror}")
    return NonFiniteError(f"{error}; the evidence is in {directory.evidence}")
