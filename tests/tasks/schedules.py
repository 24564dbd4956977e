"""Asynchronous runs in virtual time: all parts are real but devices, graders and the transfer of weights.

A seed fixes all durations, and with them the order of events; nothing sleeps. If all tasks wait for one another, the
clock jumps to a limit, and its error fails the test.
"""

import asyncio
import functools
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, cast

import torch

from tailrace.activity import Activity
from tailrace.algorithms.base import Algorithm
from tailrace.algorithms.factory import make_algorithm
from tailrace.algorithms.table import Compute
from tailrace.config.evaluation import EvaluationConfig
from tailrace.config.run import RunConfig
from tailrace.config.transfer import LocalQueueConfig
from tailrace.config.weights import WeightsMode
from tailrace.engine.backends.fake import FakeEngine, RandomPlaywright
from tailrace.errors import SenderLost, WeightsTimeout
from tailrace.events import Event, EventLog
from tailrace.report.samples import SampleRecord
from tailrace.rewards.base import Grade, GradingRequest
from tailrace.rewards.graders import Graders, Group
from tailrace.rollout.base import EngineFacts
from tailrace.rollout.gate import OpenGate, WeightsGate
from tailrace.rollout.local import LocalPort
from tailrace.rollout.updater import EngineUpdater
from tailrace.run.checkpoint import Checkpointer, RunState
from tailrace.run.evaluation import Answer, Evaluator, ways_of
from tailrace.run.generation import Generation
from tailrace.run.learner import LocalLearner
from tailrace.run.pipeline import Pipeline
from tailrace.run.queue import run_table
from tailrace.tasks.actor import Actor, Batch, StepResult
from tailrace.tasks.base import Outputs, Service, Task
from tailrace.tasks.compute import ComputeTask
from tailrace.tasks.context import TaskContext
from tailrace.tasks.prompts import PromptFeeder
from tailrace.transfer.queue.base import Claim, NewRow, Row, RowId
from tailrace.transfer.queue.local.queue import LocalQueue
from tailrace.transfer.queue.rows.table import QueueTask
from tailrace.transfer.queue.table_factory import make_tasks
from tailrace.types import IntArray, WeightVersion
from tests.helpers.contexts import make_context
from tests.helpers.runs import small_run
from tests.tasks.test_actor import RecordingTrainer
from tests.tasks.test_prompts import PROMPTS

P = ParamSpec("P")
T = TypeVar("T")

LIMIT_S = 10_000.0
"""A limit far longer than any work takes: a longer wait is a wait for ever."""
MODES: tuple[WeightsMode, ...] = ("synchronous", "delayed", "sub_step", "in_flight")


class Device(Executor):
    """An executor that does one piece of work at a time. Each takes up to `slowest` seconds."""

    def __init__(self, chance: random.Random, slowest: float) -> None:
        self.slowest = slowest
        self._chance = chance
        self._free_at = 0.0

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Begin work whose result is there when its time has passed."""
        loop = asyncio.get_running_loop()
        self._free_at = max(loop.time(), self._free_at) + self._chance.uniform(0.01, self.slowest)
        future: Future[T] = Future()
        loop.call_at(self._free_at, self._work, future, lambda: fn(*args, **kwargs))
        return future

    def _work(self, future: Future[T], work: Callable[[], T]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except Exception as error:  # any error goes to the caller who waits for the work
            future.set_exception(error)


class Hub:
    """A publisher that brings each version to each engine after a random delay. Later versions may be faster."""

    def __init__(self, chance: random.Random, engines: int, *, wait: bool, slowest: float = 9.0) -> None:
        """`wait`: `settle` waits until all engines have the version."""
        self.published: WeightVersion = 0
        self.sources = [Source(self) for _ in range(engines)]
        self.turns: list[Source] = []
        """The source that has the turn to install."""
        self.lock = asyncio.Lock()
        self._chance = chance
        self._wait = wait
        self._slowest = slowest

    async def publish(self, version: WeightVersion) -> None:
        """See `Publisher`."""
        self.published = version
        for source in self.sources:
            source.announce(version)
            after = self._chance.uniform(0.01, self._slowest)
            asyncio.get_running_loop().call_later(after, source.arrive, version)

    async def settle(self, version: WeightVersion) -> None:
        """See `Publisher`."""
        for source in self.sources if self._wait else ():
            await source.until(lambda source=source: source.has >= version)  # type: ignore[misc]


class Source:
    """A `WeightSource` without tensors."""

    def __init__(self, hub: Hub) -> None:
        self.announced: WeightVersion = 0
        self.received: WeightVersion = 0
        self.has: WeightVersion = 0
        """The version that the engine has installed."""
        self.on_take: Callable[[], None] = lambda: None
        self.on_install: Callable[[WeightVersion], None] = lambda version: None
        self._hub = hub
        self._is_lost = False
        self._waiting: set[asyncio.Event] = set()

    def lose(self, *, lost: bool) -> None:
        """Set whether the trainer is silent from now on."""
        self._is_lost = lost
        self._tell()

    def announce(self, version: WeightVersion) -> None:
        """Note that `version` is on its way."""
        self.announced = max(self.announced, version)
        self._tell()

    def arrive(self, version: WeightVersion) -> None:
        """Note that `version` has wholly arrived."""
        self.announce(version)
        self.received = max(self.received, version)
        self._tell()

    async def announcement(self, version: WeightVersion, *, timeout_s: float) -> None:
        await self._reach(lambda: self.announced >= version, timeout_s)

    async def wait(self, version: WeightVersion, *, timeout_s: float) -> WeightVersion:
        await self._reach(lambda: self.received >= version, timeout_s)
        return self.received

    async def _reach(self, condition: Callable[[], bool], timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self.until(lambda: condition() or self._is_lost)
        except TimeoutError:
            raise WeightsTimeout("nothing has come") from None
        if not condition():
            raise SenderLost("the trainer is silent")

    async def heard(self, *, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.until(lambda: not self._is_lost)

    @contextmanager
    def weights(self) -> Iterator[tuple[WeightVersion, dict[str, torch.Tensor]]]:
        self.on_take()
        yield self.received, {}

    def installed(self, version: WeightVersion) -> None:
        if version == 0:
            return  # the engine begins with version 0
        assert version > self.has
        self.has = version
        self.on_install(version)
        self._tell()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        if self._is_lost:
            raise SenderLost("the trainer is silent")
        async with asyncio.timeout(LIMIT_S):
            await self._hub.lock.acquire()
        self._hub.turns.append(self)
        try:
            yield
        finally:
            self._hub.turns.remove(self)
            self._hub.lock.release()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds, checked at each change."""
        news = asyncio.Event()
        self._waiting.add(news)
        try:
            while not condition():
                news.clear()
                await news.wait()
        finally:
            self._waiting.remove(news)

    def _tell(self) -> None:
        for news in self._waiting:
            news.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The random settings of one run."""

    seed: int
    mode: WeightsMode | Literal["colocated"]
    max_staleness: int
    streaming: bool
    in_order: bool
    mini_batches: int
    engines: int
    room: int | None
    """The room of each engine; None: no limit."""
    full_steps: int
    """The number of steps for whose rows the queue has room."""
    spare_rows: int
    """The number of rows beyond those for which the queue has room."""
    slowest_update_s: float
    steps: int
    """The number of steps, enough that the last ones could be staler than the bound allows."""
    evaluate_every: int | None
    """The number of steps between evaluations; None: there are none."""
    evaluated: int
    """The number of prompts of an evaluation."""
    group_size: int = 2
    groups_per_step: int = 2

    @classmethod
    def drawn(cls, seed: int) -> "Schedule":
        """Draw the schedule of a seed."""
        chance = random.Random(f"schedule {seed}")
        mode: WeightsMode | Literal["colocated"] = chance.choice((*MODES, "colocated"))
        streaming = chance.random() < 0.6
        most = chance.randrange(5)
        return cls(
            seed=seed,
            mode=mode,
            max_staleness=most,
            streaming=streaming,
            in_order=streaming and chance.random() < 0.3,
            mini_batches=chance.choice((1, 1, 2)),
            engines=1 if mode == "colocated" else chance.randint(1, 3),
            room=chance.choice((None, 1, 3, 5)),
            full_steps=chance.randint(1, most + 1),
            spare_rows=chance.randrange(4),
            slowest_update_s=chance.choice((0.5, 5.0, 30.0)),
            steps=most + 3,
            evaluate_every=chance.choice((None, 1, 2, 3)),
            evaluated=chance.randint(1, len(PROMPTS)),
        )

    @property
    def evaluations(self) -> list[int]:
        """The versions of the weights that are evaluated."""
        if self.evaluate_every is None:
            return []
        return [*range(0, self.steps, self.evaluate_every), self.steps]

    @property
    def samples_per_step(self) -> int:
        return self.group_size * self.groups_per_step

    @property
    def config(self) -> RunConfig:
        """The configuration, as a user would write it."""
        pipeline = {"max_staleness": self.max_staleness, "streaming": self.streaming, "in_order": self.in_order}
        return _config(tuple(pipeline.items()), self.samples_per_step, self.mini_batches, self.group_size)


@functools.cache
def _config(pipeline: tuple[tuple[str, Any], ...], samples: int, mini_batches: int, group_size: int) -> RunConfig:
    return small_run(
        Path("run"),
        Path("model"),
        Path("prompts"),
        pipeline=dict(pipeline),
        algorithm={"type": "grpo", "group_size": group_size},
        sampling__max_new_tokens=7,
        trainer={
            "train_batch_size": samples,
            "mini_batch_size": samples // mini_batches,
            "micro_batch_tokens": 11,  # smaller and larger than the tokens of some groups
        },
    )


class WatchedQueue(LocalQueue):
    """A queue that records its claims. A put is answered a while after it has happened, as by a remote queue."""

    def __init__(self, tasks: Sequence[QueueTask], chance: random.Random, **options: Any) -> None:
        super().__init__(tasks, **options)
        self._chance = chance
        self.claimed: dict[str, list[list[int]]] = {}
        """The `order` of the rows of each claim, by task."""

    async def put(self, rows: Sequence[NewRow], *, timeout: float | None = None) -> list[RowId]:
        ids = await super().put(rows, timeout=timeout)
        await asyncio.sleep(self._chance.uniform(0.0, 3.0))
        return ids

    async def claim(
        self, task: str, *, limit: int | None = None, rank: int | None = None, timeout: float | None = None
    ) -> Claim:
        claim = await super().claim(task, limit=limit, rank=rank, timeout=timeout)
        self.claimed.setdefault(task, []).append([row.order for row in claim.rows])
        return claim


def advantage_task(context: TaskContext, algorithm: Algorithm) -> ComputeTask:
    """The service of the algorithm's task `advantage`."""
    (work,) = (task.work for task in algorithm.tasks if task.name == "advantage")
    assert isinstance(work, Compute)
    return ComputeTask(context, "advantage", work)


class Grading(Task):
    """A reward task that gives random rewards after a while."""

    def __init__(self, context: TaskContext, chance: random.Random) -> None:
        super().__init__(context, "reward", workers=3)
        self._chance = chance

    async def compute(self, claim: Claim, span: Event) -> Outputs:
        await asyncio.sleep(self._chance.uniform(0.01, 3.0))
        return {row.id: {"reward": self._chance.random(), "reward_error": "", "reward_parts": {}} for row in claim.rows}


class Judges:
    """Graders of an evaluation, each of whose gradings takes a while."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    async def grade(self, request: GradingRequest, group: Group, place: int) -> Grade:
        """See `Graders`."""
        await asyncio.sleep(self._chance.uniform(0.01, 30.0))
        return Grade(reward=self._chance.random())


class ForgetfulTrainer(RecordingTrainer):
    """A recording trainer that has nothing to restore."""

    def load(self, directory: Path) -> None:
        """Restore nothing."""


class WatchedActor(Actor):
    """An actor that records what it has trained on."""

    trained: dict[int, tuple[Row, ...]]
    """The rows of each step."""

    async def apply(self, batch: Batch) -> StepResult:
        result = await super().apply(batch)
        assert batch.step not in self.trained, f"step {batch.step} is trained twice"
        self.trained[batch.step] = result.rows
        return result


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint in memory."""

    state: RunState
    queue: bytes


class MemoryCheckpointer(Checkpointer):
    """A checkpointer that notes the data position a while before it takes the queue's rows, as with a remote queue."""

    def __init__(self, queue: LocalQueue, chance: random.Random) -> None:
        self.saved: list[Saved] = []
        self._queue = queue
        self._chance = chance

    async def save(
        self,
        trained_steps: int,
        next_step: int,
        unacked: Any,
        staged: Path | None = None,
        kl_coefficients: Sequence[float] = (),
    ) -> None:
        state = RunState(
            trained_steps=trained_steps, next_step=next_step, elapsed_s=0.0, prompts="", unacked=sorted(unacked)
        )
        await asyncio.sleep(self._chance.uniform(0.01, 20.0))
        self.saved.append(Saved(state, await self._queue.snapshot()))


class Colocated:
    """The publisher of an engine and a trainer in one process."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    async def publish(self, version: WeightVersion) -> None:
        """See `Publisher`."""
        await self._engine.update_weights(version, iter(()))

    async def settle(self, version: WeightVersion) -> None:
        """There is nothing to wait for."""


class Run:
    """The parts of a schedule's run, and their records. It must be made in the loop that it runs in."""

    def __init__(self, schedule: Schedule, part: int = 0) -> None:
        """`part`: the number of resumes so far."""
        self.schedule = schedule
        self.begun = False
        """Whether the run has reached its start, so that it may be saved."""
        self.answers: dict[int, Sequence[Answer]] = {}
        """Those of each evaluation, by the version that it is of."""
        self.events: list[Event] = []
        self.chance = random.Random(f"run {schedule.seed} {part}")
        self.log = EventLog(sinks=(self.events.append,))
        config = schedule.config
        self.algorithm = make_algorithm(config.algorithm)
        table = run_table(config)
        rows = schedule.full_steps * schedule.samples_per_step + schedule.spare_rows
        self.queue = WatchedQueue(
            make_tasks(table),
            self.chance,
            config=LocalQueueConfig(max_rows=rows, timeout_s=LIMIT_S, lease_s=100 * LIMIT_S),
            columns=table.columns,
            clock=asyncio.get_running_loop().time,
        )
        self.device = Device(self.chance, schedule.slowest_update_s)
        self._make_engines()
        self._make_learner()
        self.pipeline = self._make_pipeline()

    def _make_engines(self) -> None:
        schedule = self.schedule
        colocated = schedule.mode == "colocated"
        self.engines = [
            FakeEngine(
                executor=self.device if colocated else Device(self.chance, self.chance.choice((0.2, 2.0))),
                playwright=RandomPlaywright(50),
            )
            for _ in range(schedule.engines)
        ]
        self.updaters: list[EngineUpdater] = []
        if schedule.mode == "colocated":
            return
        self.hub = Hub(self.chance, schedule.engines, wait=schedule.mode == "synchronous")
        self.updaters = [
            EngineUpdater(
                engine, source, schedule.mode, log=self.log, activity=Activity(self.log, "rollout"), timeout_s=LIMIT_S
            )
            for engine, source in zip(self.engines, self.hub.sources, strict=True)
        ]

    def _make_learner(self) -> None:
        config = self.schedule.config
        self.trainer = ForgetfulTrainer()
        self.actor = WatchedActor(
            self.queue,
            self.trainer,
            "actor",
            self.algorithm.policy_task()[1].loss,
            self.device,
            self.log,
            Activity(self.log, "trainer"),
            batch_size=config.trainer.train_batch_size,
            mini_batch_size=config.mini_batch_size,
        )
        self.actor.trained = {}
        self.checkpointer = MemoryCheckpointer(self.queue, self.chance)
        publisher = self.hub if self.updaters else Colocated(self.engines[0])
        self.learner = LocalLearner(self.actor, self.trainer, self.device, publisher, self.checkpointer, self.log)

    def _make_pipeline(self) -> Pipeline:
        schedule = self.schedule
        context = make_context(self.queue, self.log, config=schedule.config)
        generation = self._generation()
        services: list[Service] = [
            Grading(context, self.chance),
            advantage_task(context, self.algorithm),
            generation,
        ]
        feeder = PromptFeeder(
            self.queue,
            PROMPTS,
            seed=schedule.seed,
            shuffle=True,
            group_size=schedule.group_size,
            groups_per_step=schedule.groups_per_step,
            max_staleness=schedule.max_staleness,
        )
        return Pipeline(
            steps=schedule.steps,
            evaluate_every=schedule.evaluate_every or 1,
            save_every=2,
            queue=self.queue,
            services=services,
            feeder=feeder,
            learner=self.learner,
            evaluator=self._evaluator(generation) if schedule.evaluate_every else None,
            staging=Path("none"),
        )

    def _evaluator(self, generation: Generation) -> Evaluator:
        return Evaluator(
            generation.service.newest(lambda: self.learner.trained_steps),
            cast(Graders, Judges(self.chance)),
            {"held_out": PROMPTS[: self.schedule.evaluated]},
            ways_of(EvaluationConfig(samples=1), self.schedule.config.sampling),
            str,
            self.log,
            seed=self.schedule.seed,
            actor="engine",
            keep=self._keep,
        )

    def _keep(self, answers: Sequence[Answer], step: int) -> Sequence[SampleRecord]:
        self.answers[step] = answers
        return ()

    def _generation(self) -> Generation:
        gates: Sequence[WeightsGate] = self.updaters or [OpenGate()]
        ports = [
            LocalPort(
                engine,
                EngineFacts(room=self.schedule.room),
                gate=gate,
                log=self.log,
                activity=Activity(self.log, "engine"),
            )
            for engine, gate in zip(self.engines, gates, strict=True)
        ]
        return Generation(self.schedule.config, ports, self.queue, lambda ids: " ".join(map(str, ids)), self.log)

    async def go(self, start: Saved | None = None) -> None:
        """Run to the end, from the beginning or from a checkpoint."""
        async with asyncio.timeout(10 * LIMIT_S), asyncio.TaskGroup() as tasks:
            updates = [tasks.create_task(updater.run()) for updater in self.updaters]
            if start is not None:
                await self.queue.restore(start.queue)
                await self.pipeline.resume_at(Path(), start.state)
            self.begun = True
            await self.pipeline.run()
            for update in updates:
                update.cancel()


def versions(row: Row) -> list[int]:
    """The weight versions of a row's tokens."""
    cell: Any = row.cells["weight_versions"]
    array: IntArray = cell
    return [int(version) for version in array]
