"""The number of engines of a run, and its changes while the run goes on.

    a step's events ──▶ Elasticity ──add, release──┐
    tailrace scale ──number────────────────────────┼──▶ changes, one after the other ──▶ workers, service
    notice of a worker's machine ──name────────────┘

A new engine loads its model while all others generate. It is given prompts when it is ready, and begins them when it
has the weights of the moment. One that leaves is given nothing more, its responses go on elsewhere, and then it ends.
"""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tailrace.config.cluster import RolloutPoolConfig
from tailrace.errors import ClusterError, ConfigError
from tailrace.events import Event, EventLog
from tailrace.planning.dispatch.base import EngineState, Job
from tailrace.planning.dispatch.seconds import pulled
from tailrace.planning.elasticity import Elasticity, ScaleDecision, ScaleLimits
from tailrace.registers.events import EventKind
from tailrace.report.step_times import TRAINED, covered_s
from tailrace.rollout.base import EnginePort
from tailrace.rollout.service import GenerationService


@dataclass(slots=True)
class _Step:
    """What has been seen of a training step."""

    generated: list[tuple[float, float]] = field(default_factory=list)
    """The start and the end of each sample."""
    jobs: list[Job] = field(default_factory=list)
    training_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Change:
    """A change that is to be made."""

    wanted: int | None
    """Engines; None for the removal of one engine."""
    leaving: str = ""
    by: str = ""
    decision: ScaleDecision | None = None
    done: "asyncio.Future[str] | None" = None


class EngineWorkers(Protocol):
    """The rollout workers; `separated.Workers` are."""

    async def add_engine(self) -> EnginePort:
        """Start one more.

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
        self._changes: asyncio.Queue[_Change] = asyncio.Queue()
        self._steps: defaultdict[int, _Step] = defaultdict(_Step)
        self._elasticity = None
        if config.is_elastic:
            self._elasticity = Elasticity(ScaleLimits(least=config.least, most=config.most))
            log.listen(self._see)
        service.on_leaving = self.leave
        self._deciding: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Make changes until cancelled."""
        try:
            while True:
                await self._make(await self._changes.get())
        finally:
            for task in self._deciding:
                task.cancel()

    async def scale(self, wanted: int) -> str:
        """Have so many engines from now on, and return when that is so, with what was done in words.

        Raises:
            ConfigError: it is none.
            ClusterError: there is no place for so many.
        """
        if wanted < 1:
            raise ConfigError(f"rollout={wanted} is no number of workers; give 1 or more")
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._changes.put_nowait(_Change(wanted, by="hand", done=done))
        return await done

    def leave(self, name: str) -> None:
        """Have an engine leave, whose machine has given notice."""
        self._changes.put_nowait(_Change(None, leaving=name, by="notice"))

    async def _make(self, change: _Change) -> None:
        before = self._service.engines
        wanted = max(1, len(before) - 1) if change.wanted is None else change.wanted
        try:
            if change.wanted is None:
                if change.leaving not in before:
                    return
                if len(before) == 1:
                    await self._add()  # so that its responses can go on
                await self._remove(change.leaving)
            for _ in range(wanted - len(self._service.engines)):
                await self._add()
            for name in reversed(self._service.engines[wanted:]):
                await self._remove(name)
        except ClusterError as error:
            self._tell(change, before, f"{len(self._service.engines)} engines instead of {wanted}: {error}")
            if change.done is not None and not change.done.done():
                change.done.set_exception(error)
            return
        text = f"{len(before)} → {len(self._service.engines)} engines, by {change.by}"
        if change.decision is not None:
            text += f": {change.decision.why}"
        self._tell(change, before, text)
        if change.done is not None and not change.done.done():
            change.done.set_result(text)

    async def _add(self) -> None:
        self._service.add(await self._workers.add_engine())

    async def _remove(self, name: str) -> None:
        await self._service.remove(name)
        await self._workers.remove_engine(name)

    def _tell(self, change: _Change, before: Sequence[str], text: str) -> None:
        now, found = self._log.now(), change.decision
        metrics = {"engines": float(len(before)), "wanted": float(change.wanted or len(before) - 1)}
        if found is not None:
            names = ("generation_s", "training_s", "lead_s", "saved_s", "lost_s")
            metrics |= {name: getattr(found, name) for name in names}
        info = {"text": text, "by": change.by, "engines": self._service.engines}
        self._log.emit(Event(task=EventKind.SCALE, actor="driver", start=now, end=now, metrics=metrics, info=info))

    def _see(self, event: Event) -> None:
        """Keep what a decision needs of an event. The last one of a step asks for one."""
        if event.step is None:
            return
        if event.task == EventKind.SAMPLE:
            step = self._steps[event.step]
            step.generated.append((event.start, event.end))
            prompt = int(event.info.get("prompt_tokens", 1))
            tokens = float(max(1, event.tokens or 1))
            step.jobs.append(
                Job(group=int(event.info["group"]), samples=1, prompt_tokens=prompt, expected_tokens=tokens)
            )
        elif event.task in TRAINED:
            self._steps[event.step].training_s += event.end - event.start
        elif event.task == EventKind.STEP:
            seen = self._steps.pop(event.step, _Step())
            for older in [number for number in self._steps if number < event.step]:
                del self._steps[older]
            task = asyncio.get_running_loop().create_task(self._decide(seen))
            self._deciding.add(task)
            task.add_done_callback(self._deciding.discard)

    async def _decide(self, step: _Step) -> None:
        states = self._service.idle_states()
        if not states or not step.jobs or not self._changes.empty():
            return
        assert self._elasticity is not None
        loop = asyncio.get_running_loop()
        now_s, more_s, less_s = await loop.run_in_executor(None, _predicted, states, step.jobs)
        decision = self._elasticity.decide(
            engines=len(states),
            generation_s=covered_s(step.generated),
            training_s=step.training_s,
            saved_s=now_s - more_s,
            lost_s=less_s - now_s,
        )
        if decision.action != "hold":
            wanted = len(states) + (1 if decision.action == "add" else -1)
            self._changes.put_nowait(_Change(wanted, by="elasticity", decision=decision))


def _predicted(states: Sequence[EngineState], jobs: Sequence[Job]) -> tuple[float, float, float]:
    """Seconds of generation with these engines, with one more, and with one less."""
    fewer = states[1:] or states
    now, more, less = (pulled(engines, jobs).seconds for engines in (states, [*states, states[0]], fewer))
    return now, more, less
