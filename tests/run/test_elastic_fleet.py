"""A run chooses the number of its engines: in virtual time, with real decisions and a real service."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import numpy as np
import pytest

from tailrace.activity import Activity
from tailrace.config.cluster import NamedPoolConfig, RolloutPoolConfig
from tailrace.config.engine import SamplingConfig
from tailrace.engine.timed import TimedEngine
from tailrace.errors import ClusterError, ConfigError, TailraceError
from tailrace.events import Event, EventLog
from tailrace.planning.dispatch.costs import StepCosts
from tailrace.registers.events import EventKind
from tailrace.registers.metrics import METRICS
from tailrace.report.workers import kind_of
from tailrace.rollout.base import EngineFacts, EnginePort
from tailrace.rollout.local import LocalPort
from tailrace.rollout.service import GenerationService
from tailrace.run.fleet import Fleet
from tailrace.types import Request
from tests.transfer.virtual_time import virtual_time

COSTS = StepCosts(base=0.01, each=0.002, context=0.0, prefill=1e-5)
PER_STEP = 24


class VirtualLog(EventLog):
    """A log with the clock of the loop."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()


class Workers:
    """Makes engines, up to `most`. Each takes a while to start."""

    def __init__(self, log: EventLog, most: int, error: TailraceError | None = None) -> None:
        self._log = log
        self._most = most
        self._error = error or ClusterError("there is no place for another worker")
        self._made = 0
        self.load_s = 2.0
        self.most_ever = 1000
        self.alive: dict[str, LocalPort] = {}

    async def check_room(self, engines: Mapping[str, int]) -> None:
        if sum(engines.values()) > self.most_ever:
            raise ConfigError(f"the pools ask for {sum(engines.values())} CPU, and the cluster has {self.most_ever}")

    async def add_engine(self, pool: str = "rollout") -> EnginePort:
        await asyncio.sleep(self.load_s)
        if len(self.alive) == self._most:
            raise self._error
        name = f"{pool}-{self._made}"
        self._made += 1
        engine = TimedEngine(COSTS, slots=64)
        activity = Activity(self._log, "engine")
        self.alive[name] = LocalPort(engine, EngineFacts(continues=True), log=self._log, activity=activity, name=name)
        return self.alive[name]

    async def remove_engine(self, name: str) -> None:
        await self.alive.pop(name).close()


class Run:
    """Steps of generation, and of training that takes `training_s`."""

    def __init__(
        self,
        events: list[Event],
        *,
        places: int,
        max_workers: int | None = None,
        pools: dict[str, NamedPoolConfig] | None = None,
        error: TailraceError | None = None,
    ) -> None:
        self.events = events
        self.log = VirtualLog(sinks=(events.append,))
        self.workers = Workers(self.log, places, error)
        self._config = RolloutPoolConfig(workers=1, max_workers=max_workers, pools=pools or {})
        self._step = 0
        self.service: GenerationService
        self.fleet: Fleet

    @asynccontextmanager
    async def open(self) -> AsyncIterator["Run"]:
        self.service = GenerationService([await self.workers.add_engine(pool) for pool in self._config.each])
        self.fleet = Fleet(self._config, self.workers, self.service, self.log)
        async with asyncio.TaskGroup() as tasks:
            serving = [tasks.create_task(self.service.run()), tasks.create_task(self.fleet.run())]
            yield self
            for task in serving:
                task.cancel()
        for name in list(self.workers.alive):
            await self.workers.remove_engine(name)

    async def step(self, tokens: int, training_s: float) -> None:
        """Generate responses of so many tokens, and train."""
        requests = [
            Request(
                request_id=number,
                group_id=number // 4,
                prompt_ids=np.arange(5),
                sampling=SamplingConfig(max_new_tokens=tokens, ignore_eos=True),
                seed=number,
            )
            for number in range(PER_STEP)
        ]
        async for made in self.service.generate(requests, step=self._step):
            info = {"group": made.sample.group_id, "prompt_tokens": 5}
            self._tell("sample", made.start, tokens=tokens, info=info)
        start = self.log.now()
        await asyncio.sleep(training_s)
        self._tell("actor", start)
        self._tell("step", start)
        self._step += 1
        await asyncio.sleep(3.0)  # decisions are made, and engines start

    def _tell(self, task: str, start: float, **fields: object) -> None:
        event = Event(task=task, actor="x", start=start, end=self.log.now(), step=self._step, **fields)  # type: ignore[arg-type]
        self.log.emit(event)

    @property
    def changes(self) -> list[Event]:
        return [event for event in self.events if event.task == "scale"]


@virtual_time
async def test_engines_are_added_while_responses_grow_and_released_when_they_shrink() -> None:
    async with Run([], places=5, max_workers=3).open() as run:
        counts = []
        for step in range(16):
            await run.step(100 if step < 4 else 1500 if step < 10 else 60, training_s=20.0)
            counts.append(len(run.service.engines))
        assert counts[3] == 1, "generation is the shorter one"
        assert counts[9] == 3
        assert counts[-1] < 3
        added = run.changes[0]
        assert added.metrics["lead_s"] == added.metrics["generation_s"] - added.metrics["training_s"]
        assert added.metrics.keys() == {metric.name for metric in METRICS if EventKind.SCALE in metric.of}
        assert added.metrics["lead_s"] >= added.metrics["saved_s"] > 0
        assert added.info["text"].startswith("1 → 2 engines, by elasticity: generation is the longer one")
        assert set(run.workers.alive) == set(run.service.engines)


@virtual_time
async def test_a_place_that_is_missing_is_told_and_the_run_goes_on() -> None:
    async with Run([], places=1, max_workers=3).open() as run:
        for _ in range(6):
            await run.step(1500, training_s=5.0)
        assert run.service.engines == ["rollout-0"]
        assert "1 engines instead of 2: there is no place for another worker" in run.changes[0].info["text"]


@virtual_time
async def test_of_several_pools_the_elastic_one_grows_and_shrinks() -> None:
    async with Run([], places=5, pools={"spare": NamedPoolConfig(max_workers=3)}).open() as run:
        counts = []
        for step in range(16):
            await run.step(1500 if step < 6 else 60, training_s=10.0)
            counts.append(Counter(kind_of(name) for name in run.service.engines))
        assert {count["rollout"] for count in counts} == {1}
        assert counts[5]["rollout.spare"] == 3
        assert counts[-1]["rollout.spare"] < 3
        assert {event.info["pool"] for event in run.changes} == {"rollout.spare"}
        assert run.changes[0].info["text"].startswith("rollout.spare: 1 → 2 engines, by elasticity: ")
        assert set(run.workers.alive) == set(run.service.engines)


@virtual_time
async def test_a_pool_that_the_run_chooses_for_does_not_fall_below_its_least() -> None:
    pools = {"spare": NamedPoolConfig(max_workers=3), "other": NamedPoolConfig()}
    async with Run([], places=5, pools=pools).open() as run:
        for name in ("rollout.spare-1", "rollout.other-2"):
            run.fleet.leave(name)
        await run.step(60, training_s=20.0)
        assert Counter(map(kind_of, run.service.engines)) == {"rollout": 1, "rollout.spare": 1}
        assert "rollout.spare-1" not in run.service.engines, "another came in its place"


@virtual_time
async def test_a_worker_that_cannot_open_its_engine_is_told_and_the_run_goes_on() -> None:
    async with Run([], places=1, error=ConfigError("the engine needs 9 GiB, and 1 GiB are available")).open() as run:
        with pytest.raises(ClusterError, match="1 engines instead of 2: the engine needs 9 GiB"):
            await run.fleet.scale(2)
        await run.step(100, training_s=5.0)
        assert run.service.engines == ["rollout-0"]


@virtual_time
async def test_without_bounds_the_number_stays() -> None:
    async with Run([], places=5).open() as run:
        for _ in range(6):
            await run.step(1500, training_s=5.0)
        assert run.changes == []
        assert await run.fleet.scale(4) == "1 → 4 engines, by hand"
        await run.step(100, training_s=5.0)
        assert len(run.service.engines) == 4


@virtual_time
async def test_time_in_which_two_steps_are_generated_counts_for_the_earlier_one() -> None:
    async with Run([], places=5, max_workers=3).open() as run:
        await run.step(100, training_s=20.0)  # so that its engine has told what steps cost
        for step in (1, 2):  # from 10 to 30 s, and from 20 to 40 s
            for number in range(PER_STEP):
                event = Event(task="sample", actor="x", start=10.0 * step, end=10.0 * step + 20, step=step)
                event.tokens, event.info = 100, {"group": number // 4, "prompt_tokens": 5}
                run.log.emit(event)
            for task in ("actor", "step"):
                run.log.emit(Event(task=task, actor="x", step=step, start=0.0, end=5.0))
            await asyncio.sleep(3.0)
        (added,) = run.changes
        assert added.metrics["generation_s"] == 10.0
        assert added.metrics["lead_s"] == 5.0 >= added.metrics["saved_s"]


@virtual_time
async def test_a_notice_waits_for_no_engine_that_loads() -> None:
    async with Run([], places=5).open() as run:
        assert await run.fleet.scale(2) == "1 → 2 engines, by hand"
        start, growing = run.log.now(), asyncio.create_task(run.fleet.scale(4))
        await asyncio.sleep(0.5)
        run.fleet.leave("rollout-1")
        assert await growing == "2 → 3 engines, by hand"
        left, grown = run.changes[1:]
        assert (left.info["text"], left.end) == ("2 → 1 engines, by notice", start + 0.5)
        assert grown.end == start + 4.0
        assert run.service.engines == ["rollout-0", "rollout-2", "rollout-3"]


@virtual_time
async def test_a_newer_number_ends_the_change_before_it() -> None:
    async with Run([], places=500, pools={"wide": NamedPoolConfig()}).open() as run:
        start, slip = run.log.now(), asyncio.create_task(run.fleet.scale(100))
        await asyncio.sleep(3.0)
        other = asyncio.create_task(run.fleet.scale(2, "rollout.wide"))
        assert await run.fleet.scale(1) == "rollout: 2 → 1 engines, by hand"
        with pytest.raises(ClusterError, match="rollout: 1 → 2 engines instead of 100: 1 were asked for meanwhile"):
            await slip
        assert await other == "rollout.wide: 1 → 2 engines, by hand"
        assert [change.end - start for change in run.changes] == [3.0, 3.0, 5.0], "none waits for one that loads"
        assert Counter(map(kind_of, run.workers.alive)) == {"rollout": 1, "rollout.wide": 2}


@virtual_time
async def test_a_number_that_replaces_one_that_waits_for_a_place_is_reached_at_once() -> None:
    async with Run([], places=5, max_workers=3).open() as run:
        run.workers.load_s = 300.0
        said: list[str] = []
        waiting = asyncio.create_task(run.fleet.scale(3, on_wait=said.append))
        await asyncio.sleep(5.0)
        for name, text in (("rollout-1", "it waits"), ("reward-0", "of another kind")):
            run.log.emit(Event(task="worker_waits", actor=name, start=5.0, end=5.0, info={"text": text}))
        waiting.cancel()  # its client was killed
        at = run.log.now()
        assert await run.fleet.scale(1) == "1 → 1 engines, by hand"
        assert run.log.now() == at
        assert said == ["it waits"]
        assert [event.info["text"] for event in run.changes] == [
            "1 engines instead of 3: 1 were asked for meanwhile",
            "1 → 1 engines, by hand",
        ]
        assert list(run.workers.alive) == ["rollout-0"]


@virtual_time
async def test_a_number_by_hand_ends_what_the_run_has_chosen() -> None:
    async with Run([], places=5, max_workers=3).open() as run:
        run.workers.load_s = 300.0
        for _ in range(3):
            await run.step(1500, training_s=5.0)
        assert await run.fleet.scale(1) == "1 → 1 engines, by hand"
        assert [event.info["by"] for event in run.changes] == ["elasticity", "hand"]


@virtual_time
async def test_more_than_the_cluster_could_ever_hold_is_refused_at_once() -> None:
    async with Run([], places=5).open() as run:
        run.workers.most_ever = 2
        at = run.log.now()
        said = "1 engines instead of 3: the pools ask for 3 CPU, and the cluster has 2"
        with pytest.raises(ClusterError, match=said):
            await run.fleet.scale(3)
        assert run.log.now() == at
        assert await run.fleet.scale(2) == "1 → 2 engines, by hand"


@virtual_time
async def test_a_run_chooses_no_more_engines_than_there_is_room_for_and_says_so_once() -> None:
    async with Run([], places=5, max_workers=3).open() as run:
        run.workers.most_ever = 2
        for _ in range(16):
            await run.step(1500, training_s=5.0)
        first, second = run.changes
        assert first.info["text"].startswith("1 → 2 engines, by elasticity")
        assert second.info["text"] == "2 engines instead of 3: the pools ask for 3 CPU, and the cluster has 2"


@virtual_time
async def test_two_machines_that_give_notice_together_are_both_left() -> None:
    async with Run([], places=5).open() as run:
        await run.fleet.scale(2)
        for name in ("rollout-0", "rollout-1", "rollout-0"):
            run.fleet.leave(name)
        await run.step(100, training_s=5.0)
        assert run.service.engines == list(run.workers.alive) == ["rollout-2"]
        assert [change.info["by"] for change in run.changes] == ["hand", "notice", "notice"]


@virtual_time
async def test_nothing_is_decided_while_the_number_changes() -> None:
    async with Run([], places=5, max_workers=3).open() as run:
        run.workers.load_s = 150.0
        growing = asyncio.create_task(run.fleet.scale(4))
        for _ in range(6):
            await run.step(1500, training_s=5.0)
        assert await growing == "1 → 4 engines, by hand"
        assert len(run.changes) == 1
