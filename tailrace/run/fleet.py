"""The number of engines of each pool of a run, and its changes while the run goes on.

    a step's events ──▶ Elasticity ──add, release──┐
    tailrace scale ──pool, number──────────────────┴──▶ changes, one after the other ──┐
    notice of a worker's machine ──name────────────────────────────────────────────────┼──▶ workers, service
    another model than the run's ──name────────────────────────────────────────────────┘

A notice waits for no other change: its machine ends soon, and a new engine takes a while to load. No decision is made
while a number changes. A number that is asked for by hand ends the change before it in its pool, even while an engine
of that waits for a place or loads: after a slip, one need not wait for a hundred engines.

What the cluster could never hold is refused before anything is begun. On a cluster that other machines may join, an
engine waits for its place up to `cluster.start_limit_s`.

A new engine loads its model while all others generate. It is given prompts when it is ready, and begins them when it
has the weights of the moment. One that leaves is given nothing more, its responses go on elsewhere, and then it ends.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from tailrace.config.cluster import ROLLOUT, RolloutPoolConfig
from tailrace.errors import ClusterError, ConfigError, TailraceError, WorkerDied, did_you_mean
from tailrace.events import Event, EventLog
from tailrace.planning.elasticity import Elasticity, ScaleDecision, ScaleLimits
from tailrace.planning.scaling import SeenStep, StepWatch, decided, predicted, scale_event, scaled_text
from tailrace.registers.events import EventKind
from tailrace.report.workers import kind_of
from tailrace.rollout.base import EnginePort
from tailrace.rollout.service import GenerationService


@dataclass(frozen=True, slots=True)
class _Change:
    """A change that is to be made."""

    pool: str
    wanted: int | None
    """Engines of the pool; None for the removal of one engine."""
    leaving: str = ""
    misfit: str = ""
    """Why the service does not use the one that is to be removed."""
    by: str = ""
    decision: ScaleDecision | None = None
    done: "asyncio.Future[str] | None" = None
    on_wait: Callable[[str], None] = lambda _: None


class EngineWorkers(Protocol):
    """The rollout workers; `separated.Workers` are."""

    async def check_room(self, engines: Mapping[str, int]) -> None:
        """Check that the cluster could hold so many workers of each rollout pool, beside those of other kinds.

        Raises:
            ConfigError: it never could.
        """

    async def add_engine(self, pool: str) -> EnginePort:
        """Start one more in a pool. The name of its worker is that of the pool, a dash and a number.

        Raises:
            ClusterError: there is no place for it.
        """

    async def remove_engine(self, name: str) -> None:
        """Close one, which has nothing left to do."""


class Fleet:
    """Adds and removes engines. It is a service of the run, and listens to its events."""

    def __init__(
        self, config: RolloutPoolConfig, workers: EngineWorkers, service: GenerationService, log: EventLog
    ) -> None:
        self._config = config
        self._workers = workers
        self._service = service
        self._log = log
        self._inbox: asyncio.Queue[_Change | SeenStep] = asyncio.Queue()
        self._turn = asyncio.Lock()
        """Held while a number changes."""
        self._asked: dict[str, _Change] = {}
        """The newest change by hand of each pool, until it has been made."""
        self._making: _Change | None = None
        """The change of a number that is being made."""
        self._adding: asyncio.Timeout | None = None
        """Ends the start of an engine for that change."""
        self._watch = StepWatch()
        self._elasticity = None
        if config.elastic is not None:
            pool = config.each[config.elastic]
            self._elasticity = Elasticity(ScaleLimits(least=pool.least, most=pool.most))
            log.listen(self._see)
        log.listen(self._pass_on_wait)
        service.on_leaving = self.leave
        service.on_misfit = self._close_misfit

    async def run(self) -> None:
        """Make changes until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                item = await self._inbox.get()
                tasks.create_task(self._decide(item) if isinstance(item, SeenStep) else self._make(item))

    async def scale(self, wanted: int, pool: str = ROLLOUT, on_wait: Callable[[str], None] = lambda _: None) -> str:
        """Have so many engines in a pool from now on, and return when that is so, with what was done in words.

        Args:
            on_wait: called with a message while an engine waits for a place.

        Raises:
            ConfigError: there is no such pool, or no engine would be left.
            ClusterError: there is no place for so many, or another number was asked for meanwhile.
        """
        if pool not in self._config.each:
            names = list(self._config.each)
            raise ConfigError(
                f"{pool} is no pool of rollout workers; there are {', '.join(names)}{did_you_mean(pool, names)}"
            )
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        change = self._asked[pool] = _Change(pool, wanted, by="hand", done=done, on_wait=on_wait)
        self._inbox.put_nowait(change)
        making, adding = self._making, self._adding
        if making is not None and making.pool == pool and adding is not None and not adding.expired():
            adding.reschedule(0)
        return await done

    def leave(self, name: str) -> None:
        """Have an engine leave, whose machine has given notice."""
        self._inbox.put_nowait(_Change(kind_of(name), None, leaving=name, by="notice"))

    def _close_misfit(self, name: str, why: str) -> None:
        self._inbox.put_nowait(_Change(kind_of(name), None, leaving=name, misfit=why, by="model"))

    def _of(self, pool: str) -> list[str]:
        """The names of the engines of a pool."""
        return [name for name in self._service.engines if kind_of(name) == pool]

    async def _make(self, change: _Change) -> None:
        if change.wanted is None:
            await self._make_now(change)
            return
        async with self._turn:
            self._making = change
            try:
                await self._make_now(change)
            finally:
                self._making = None
                if self._asked.get(change.pool) is change:
                    del self._asked[change.pool]

    def _pass_on_wait(self, event: Event) -> None:
        making = self._making
        if event.task == EventKind.WORKER_WAITS and making is not None and making.pool == kind_of(event.actor):
            making.on_wait(str(event.info["text"]))

    async def _make_now(self, change: _Change) -> None:
        before = len(self._service.engines)
        more = 0 if change.wanted is None else change.wanted - len(self._of(change.pool))
        try:
            text = await self._misfit_closed(change) if change.misfit else await self._scaled(change)
        except (ClusterError, ConfigError) as error:
            if isinstance(error, ClusterError):
                self._tell(change, before, before + more, str(error))
            if change.done is not None and not change.done.done():
                change.done.set_exception(error)
            return
        if text:
            self._tell(change, before, len(self._service.engines), text)
        if change.done is not None and not change.done.done():
            change.done.set_result(text)

    async def _misfit_closed(self, change: _Change) -> str:
        await self._workers.remove_engine(change.leaving)
        return change.misfit

    async def _scaled(self, change: _Change) -> str:
        """Add engines, or remove some. Returns what was done in words; empty where that was done before."""
        pool, before = change.pool, self._of(change.pool)
        least = 0 if len(self._service.engines) > len(before) else 1
        if change.wanted is None:  # what the run chooses from stays within its bounds
            kept = self._config.each[pool].least if pool == self._config.elastic else least
            wanted = max(least, min(kept, len(before)), len(before) - 1)
        else:
            wanted = change.wanted
        if wanted < least:
            raise ConfigError(f"{pool}={wanted} is no number of workers; give {least} or more")
        try:
            if change.wanted is None:
                if change.leaving not in before:
                    return ""
                if len(before) <= wanted:
                    await self._check_room(change, len(before) + 1)
                    await self._add(pool)  # so that its responses can go on
                await self._remove(change.leaving)
            else:
                if wanted > len(before):
                    await self._check_room(change, wanted)
                for _ in range(wanted - len(before)):
                    self._check_newest(change)
                    await self._add_for(change)
                for name in reversed(before[wanted:]):
                    self._check_newest(change)
                    await self._remove(name)
        except TailraceError as error:  # also what a worker raised when it opened
            there = len(self._of(pool))
            change_to = f"{there}" if there == len(before) else f"{len(before)} → {there}"
            raise ClusterError(f"{self._named(pool)}{change_to} engines instead of {wanted}: {error}") from None
        return self._named(pool) + scaled_text(len(before), len(self._of(pool)), change.by, change.decision)

    def _check_newest(self, change: _Change) -> None:
        newest = self._asked.get(change.pool)
        if newest is not None and newest is not change:
            raise ClusterError(f"{newest.wanted} were asked for meanwhile")

    async def _check_room(self, change: _Change, wanted: int) -> None:
        there = Counter(kind_of(name) for name in self._service.engines)
        try:
            await self._workers.check_room(there | Counter({change.pool: wanted}))
        except ConfigError:
            if change.decision is not None and self._elasticity is not None:
                self._elasticity.bound(there[change.pool])
            raise

    async def _add_for(self, change: _Change) -> None:
        """Add an engine, unless another number is asked for meanwhile."""
        try:
            async with asyncio.timeout(None) as self._adding:
                await self._add(change.pool)
        except TimeoutError:
            self._check_newest(change)
            raise
        finally:
            self._adding = None

    def _named(self, pool: str) -> str:
        """The name of a pool before what is said of it, where there are several."""
        return f"{pool}: " if self._config.pools else ""

    async def _add(self, pool: str) -> None:
        port = await self._workers.add_engine(pool)
        try:
            self._service.check_model(port.name, await port.ready())
        except WorkerDied:
            pass  # another comes in its place, and the service waits for that
        except (ClusterError, asyncio.CancelledError):
            await self._workers.remove_engine(port.name)
            raise
        self._service.add(port)

    async def _remove(self, name: str) -> None:
        if name in self._service.engines:  # otherwise it leaves already
            await self._service.remove(name)
            await self._workers.remove_engine(name)

    def _tell(self, change: _Change, before: int, wanted: int, text: str) -> None:
        engines, decision = self._service.engines, change.decision
        self._log.emit(
            scale_event(
                self._log.now(),
                text,
                pool=change.pool,
                by=change.by,
                before=before,
                wanted=wanted,
                engines=engines,
                decision=decision,
            )
        )

    def _see(self, event: Event) -> None:
        if (step := self._watch.see(event)) is not None:
            self._inbox.put_nowait(step)

    async def _decide(self, step: SeenStep) -> None:
        pool, states = self._config.elastic, self._service.idle_states()
        own = [state for state in states if kind_of(state.name) == pool]
        if not own or not step.jobs or self._turn.locked():
            return
        assert self._elasticity is not None
        assert pool is not None
        loop = asyncio.get_running_loop()
        seconds = await loop.run_in_executor(None, predicted, states, own[0], step.jobs)
        if self._turn.locked():
            return
        decision, wanted = decided(self._elasticity, step, len(own), seconds)
        if decision.action != "hold":
            self._inbox.put_nowait(_Change(pool, wanted, by="elasticity", decision=decision))
