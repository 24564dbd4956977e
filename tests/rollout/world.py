"""A generation service in virtual time: the service and its ports are real, engines take the time that steps cost.

Engines join and leave, die and come back, get new weights late; streams are closed. A seed fixes all of that.
"""

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from tailrace.activity import Activity
from tailrace.config.engine import SamplingConfig
from tailrace.config.rollout import DispatchConfig, Order
from tailrace.config.rollout import Policy as PolicyName
from tailrace.engine.timed import TimedEngine
from tailrace.errors import ClusterError, WorkerDied
from tailrace.events import Event, EventLog
from tailrace.planning.dispatch.costs import StepCosts
from tailrace.planning.dispatch.factory import make_policy
from tailrace.planning.lengths.base import Asked, LengthPredictor
from tailrace.planning.lengths.history import History, Siblings
from tailrace.planning.lengths.oracle import Oracle
from tailrace.planning.remaining import LengthHistory
from tailrace.rollout.base import EngineFacts, EnginePort, News, Parcel
from tailrace.rollout.foresight import Foresight
from tailrace.rollout.local import LocalPort
from tailrace.rollout.service import GenerationService
from tailrace.rollout.streams import Generated
from tailrace.types import CacheForm, IntArray, Piece, Request, WeightVersion

MOST = 400
"""`max_new_tokens`."""


def tokens_of(request: Request) -> IntArray:
    """A response whose length is much like that of others in its group."""
    own, group = np.random.default_rng(request.seed), np.random.default_rng(request.group_id)
    length = int(np.clip(40 * np.exp(group.normal(0, 1) + own.normal(0, 0.4)), 1, MOST))
    return own.integers(0, 50, length)


FORMS = (None, *(CacheForm(name=name, token_bytes=100) for name in ("a", "a", "a", "a", "a", "a", "b")))


class VersionGate:
    """Waits until an engine has the weights; see `WeightsGate`."""

    def __init__(self) -> None:
        self.version: WeightVersion = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def generating(self, needed: WeightVersion) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: self.version >= needed)
        yield

    async def install(self, engine: TimedEngine, version: WeightVersion) -> None:
        """Give the engine newer weights; older ones are passed over."""
        if version > self.version:
            await engine.update_weights(version, ())
            self.version = max(version, self.version)
            async with self._changed:
                self._changed.notify_all()


class MortalPort(EnginePort):
    """The port of an engine that may die. Another takes its place after a while, with the weights of the moment."""

    def __init__(self, world: "World", name: str, engine: "EngineKind") -> None:
        self.name = name
        self._world = world
        self._kind = engine
        self._form = world.chance.choice(FORMS)
        self._died = asyncio.Event()
        self._begin()

    def _begin(self) -> None:
        kind = self._kind
        self.engine = TimedEngine(
            kind.costs, slots=kind.slots, tokens_of=tokens_of, tells=kind.tells, cache_form=self._form
        )
        self.gate = VersionGate()
        log = EventLog(sinks=(self._world.events.append,), worker=self.name, origin=self._world.log.origin)
        facts = EngineFacts(room=kind.room, continues=kind.continues, cache=self._form)
        self._local = LocalPort(self.engine, facts, log=log, activity=Activity(log, "engine"), gate=self.gate)
        self._is_dead = False

    def kill(self) -> None:
        """Lose all that the engine has."""
        if not self._is_dead:
            self._world.dead.append(asyncio.create_task(self._local.close()))  # its process would just end
        self._is_dead = True
        self._died.set()
        self._died = asyncio.Event()

    async def close(self) -> None:
        """End all."""
        await self._local.close()

    async def ready(self) -> EngineFacts:
        await asyncio.sleep(self._world.chance.uniform(0, 3))
        if self._is_dead:
            self._begin()
        await self.gate.install(self.engine, self._world.version)
        return await self._local.ready()

    async def give(self, parcels: Sequence[Parcel]) -> None:
        await self._afar()
        came = [request.begun for parcel in parcels for request in parcel.requests if request.begun is not None]
        self._world.came += sum(begun.cache is not None for begun in came)
        assert all(begun.cache is None or begun.cache.form == self._form for begun in came)
        await self._local.give(parcels)
        await self._afar()

    async def news(self) -> list[News]:
        if self._is_dead:
            raise WorkerDied.of(self.name, 1, "signal 9")
        news = asyncio.create_task(self._local.news())
        died = asyncio.create_task(self._died.wait())
        try:
            await asyncio.wait([news, died], return_when=asyncio.FIRST_COMPLETED)
        finally:
            died.cancel()
            if not news.done():
                news.cancel()
        if self._is_dead:
            raise WorkerDied.of(self.name, 1, "signal 9")
        await self._afar()
        return news.result()

    async def withdraw(self, request_ids: Collection[int], *, with_cache: bool = False) -> None:
        await self._afar()
        await self._local.withdraw(request_ids, with_cache=with_cache)
        await self._afar()
        self._world.withdrawn += len(request_ids)

    async def drop(self, request_ids: Collection[int]) -> None:
        await self._afar()
        await self._local.drop(request_ids)
        await self._afar()

    async def _afar(self) -> None:
        """A message takes a moment, in which the engine may die."""
        if self._is_dead:
            raise WorkerDied.of(self.name, 1, "signal 9")
        await asyncio.sleep(self._world.chance.uniform(0, 0.02))
        if self._is_dead:
            raise WorkerDied.of(self.name, 1, "signal 9")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """What an engine is like."""

    costs: StepCosts
    slots: int
    room: int | None
    tells: bool
    continues: bool


@dataclass(slots=True)
class Step:
    """A training step whose responses are asked for."""

    number: int
    needed: WeightVersion
    groups: int
    of_group: int
    closed: bool
    """Whether its stream is closed early."""
    streams: bool
    """Whether the newest tokens are told while responses run."""
    samples: list[Generated] = field(default_factory=list)
    told: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """The tokens that were told before the end, by request."""

    def requests(self) -> list[Request]:
        """Their ids are those of their places in the step."""
        return [
            Request(
                request_id=place,
                group_id=1000 * self.number + place // self.of_group,
                number=place % self.of_group,
                prompt_ids=np.arange(1, 2 + self.number % 7),
                sampling=SamplingConfig(max_new_tokens=MOST),
                seed=10_000 * self.number + place,
                streams=self.streams,
            )
            for place in range(self.groups * self.of_group)
        ]


class World:
    """One schedule."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.version: WeightVersion = 0
        self.events: list[Event] = []
        self.log = EventLog(sinks=(self.events.append,))
        self.withdrawn = 0
        self.came = 0
        """Responses that an engine was given with their cache."""
        self.dead: list[asyncio.Task[None]] = []
        self.happened: Counter[str] = Counter()
        self.policy: PolicyName = chance.choice(("pull", "round_robin", "random", "streamrl", "skewness_aware"))
        self.lengths = chance.choice(("history", "siblings", "oracle"))
        if self.policy in ("streamrl", "skewness_aware"):
            self.lengths = chance.choice(("history", "siblings", "oracle"))
        elif chance.random() < 0.5:
            self.lengths = "none"
        self.of_group = chance.choice((1, 2, 4))
        self.groups = chance.randint(1, 8)
        self.kind = EngineKind(
            costs=StepCosts(
                base=0.02, each=chance.choice((0.0, 1e-3)), context=1e-6, prefill=chance.choice((1e-5, 1e-3, 1e-3))
            ),
            slots=chance.choice((1, 3, 8)),
            room=chance.choice((None, 4, 10)),
            tells=chance.random() < 0.8,
            continues=chance.random() < 0.8,
        )
        self.ports = [MortalPort(self, f"rollout-{number}", self.kind) for number in range(chance.randint(1, 4))]
        history = LengthHistory()
        policy = make_policy(DispatchConfig(policy=self.policy), history, seed=seed)
        self.foresight = None
        order: Order = "first_in"
        if self.lengths != "none":
            predictor = cast(
                LengthPredictor, {"history": History, "siblings": Siblings, "oracle": Oracle}[self.lengths]()
            )
            config = DispatchConfig(check_every=1, least_gain=chance.choice((0.0, 0.02)))
            per_step = self.groups * self.of_group
            self.foresight = Foresight(predictor, policy, config, history, self.log, samples_per_step=per_step)
            order = chance.choice(("first_in", "longest_first", "shortest_first"))
        self.one_version = chance.random() < 0.15
        self.service = GenerationService(
            self.ports, policy, foresight=self.foresight, order=order, one_version=self.one_version
        )
        self.service.on_move = lambda source, target, way: self.happened.update([way])
        self.steps: list[Step] = []

    async def run(self) -> None:
        """Generate a few steps while all kinds of things happen."""
        async with asyncio.timeout(100_000), asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(self.service.run())
            trouble = tasks.create_task(self._trouble())
            generating: list[asyncio.Task[None]] = []
            for number in range(self.chance.randint(2, 5)):
                closed = self.chance.random() < 0.15
                step = Step(number, self.version, self.groups, self.of_group, closed, streams=number % 2 == 0)
                self.steps.append(step)
                generating.append(tasks.create_task(self._generate(step)))
                if self.chance.random() < 0.7:
                    await generating[-1]
                await self._update(tasks)
            await asyncio.wait(generating)
            trouble.cancel()
            await asyncio.wait([trouble])
            serving.cancel()
            await asyncio.gather(*self.dead, *(port.close() for port in self.ports))

    async def _generate(self, step: Step) -> None:
        requests = step.requests()
        asked = [
            Asked(
                prompt_id=str(request.group_id % 1000),
                prompt_tokens=len(request.prompt_ids),
                forced=len(tokens_of(request)),
            )
            for request in requests
        ]
        stream = self.service.generate(requests, version=step.needed, step=step.number, asked=asked)
        async with aclosing(stream):
            stream.wants_pieces = step.streams
            async for made in stream.with_pieces():
                if isinstance(made, Piece):
                    assert made.start == len(step.told[made.request_id])
                    step.told[made.request_id] += made.tokens
                    continue
                step.samples.append(made)
                if step.closed and self.chance.random() < 0.2:
                    return

    async def _update(self, tasks: asyncio.TaskGroup) -> None:
        self.version += 1
        for port in self.ports:
            tasks.create_task(self._install(port, self.version, self.chance.uniform(0, 5)))

    async def _install(self, port: MortalPort, version: WeightVersion, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await port.gate.install(port.engine, version)

    async def _trouble(self) -> None:
        """Kill engines, add some, remove some."""
        while True:
            await asyncio.sleep(self.chance.expovariate(1 / 4))
            what = self.chance.choice(("kill", "add", "remove", "nothing"))
            match what:
                case "kill":
                    self.chance.choice(self.ports).kill()
                case "add" if len(self.ports) < 5:
                    self.ports.append(port := MortalPort(self, f"late-{self.happened['add']}", self.kind))
                    self.service.add(port)
                case "remove" if len(self.ports) > 1:
                    port = self.chance.choice(self.ports)
                    self.ports.remove(port)
                    with suppress(ClusterError):
                        await self.service.remove(port.name)
                    await port.close()
                case _:
                    continue
            self.happened[what] += 1
