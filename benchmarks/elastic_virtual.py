"""A run whose responses grow to twice their length, and which chooses its number of engines, in virtual time.

    python benchmarks/elastic_virtual.py [--steps 30] [--groups 128] [--seeds 3] [--trainer-tokens-per-s 11500]

This is the experiment of StreamRL's figure 11: the longest response has 10,000 tokens at the start, and 20,000 at the
end. The run is fully asynchronous, one step ahead. It begins with one engine, and may have three. The fleet, its
decisions and the generation service are the real ones. Engines take the time of `h100_steps.json` for a step, and a
new one is ready after `LOAD_S`. The trainer takes the same time for each token, at a pace at which the first step needs
one engine only: 11,500 tokens a second.

The same lengths are also played with one, two and three engines throughout. A *phase* is a stretch of steps between two
changes. The best number of a phase is the one whose run took the least time for these steps; of those within `ALIKE`,
the fewest. The last line is JSON, with a list that has an entry for each seed:

    changes           the steps at whose end the run asked for another engine
    best              the best number of each phase
    phases            the seconds of each phase beside those of its best number
    step_over_right   the same of the whole run, and settled: of the steps that began after the last change
    engine_s_share    seconds of engines, as a part of those of three engines throughout
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from typing import Any

import typer
from dispatch_virtual import ARMS, read_profile, requests_of, zeros

from tailrace.activity import Activity
from tailrace.config.cluster import ROLLOUT, RolloutPoolConfig
from tailrace.engine.timed import TimedEngine
from tailrace.events import Event, EventLog
from tailrace.host.virtual_loop import VirtualLoop
from tailrace.planning.admission import oldest_version
from tailrace.registers.events import EventKind
from tailrace.rollout.base import EngineFacts, EnginePort
from tailrace.rollout.local import LocalPort
from tailrace.rollout.service import GenerationService
from tailrace.rollout.streams import Generated
from tailrace.run.fleet import Fleet
from tailrace.types import Request
from tailrace.workloads.replay import Replay
from tailrace.workloads.samplers.factory import open_workload

MODEL, WORKLOAD = "8b", "math-235b"
LONGEST = 10_000
"""Tokens of the longest response, before it grows."""
GROUP_SIZE, SLOTS = 8, 128
MOST = 3
"""Engines."""
LOAD_S = 60.0
TRAINER_TOKENS_PER_S = 11_500.0
AHEAD = 1
"""Steps that prompts run ahead; see `pipeline.max_staleness`."""
ALIKE = 0.01
"""The part by which a time may be longer and still count as the least."""


class VirtualLog(EventLog):
    """A log with the clock of the loop, for as long as there is one."""

    def now(self) -> float:
        """Seconds since the loop was made."""
        return asyncio.get_running_loop().time()


class Engines:
    """Makes engines; see `EngineWorkers`."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._times, self._tp, self._cache_tokens = read_profile(MODEL)
        self._made = 0
        self._alive: dict[str, LocalPort] = {}

    def make(self) -> LocalPort:
        """Make one that is ready."""
        engine = TimedEngine(self._times, slots=SLOTS, cache_tokens=self._cache_tokens, tp=self._tp, tokens_of=zeros)
        name, self._made = f"{ROLLOUT}-{self._made}", self._made + 1
        facts = EngineFacts(room=SLOTS + GROUP_SIZE, continues=True)
        activity = Activity(self._log, "engine")
        self._alive[name] = LocalPort(engine, facts, log=self._log, activity=activity, name=name)
        return self._alive[name]

    async def add_engine(self, pool: str) -> EnginePort:
        """See `EngineWorkers`."""
        await asyncio.sleep(LOAD_S)
        return self.make()

    async def check_room(self, engines: Mapping[str, int]) -> None:
        """See `EngineWorkers`; there is room for any number."""

    async def remove_engine(self, name: str) -> None:
        """See `EngineWorkers`."""
        await self._alive.pop(name).close()

    async def close(self) -> None:
        """Close all."""
        for name in list(self._alive):
            await self.remove_engine(name)


class Run:
    """Steps of generation and training, which overlap."""

    def __init__(
        self, replay: Replay, groups: int, *, workers: int, most: int | None, trainer_tokens_per_s: float
    ) -> None:
        """`groups`: of a step. `workers`: engines at the start. `most`: engines, where the run chooses."""
        self.ends = [0.0]
        """When each step began and the last one ended."""
        self.asked: list[int] = []
        """The steps at whose end an engine was asked for, or let go."""
        self.engine_s = 0.0
        self._replay = replay
        self._groups = groups
        self._pace = trainer_tokens_per_s
        self._log = VirtualLog(sinks=(self._see,))
        self._engines = Engines(self._log)
        self._service = GenerationService([self._engines.make() for _ in range(workers)])
        config = RolloutPoolConfig(workers=workers, max_workers=most)
        self._fleet = Fleet(config, self._engines, self._service, self._log)
        self._version = 0
        self._published = asyncio.Condition()
        self._complete: defaultdict[int, asyncio.Queue[int]] = defaultdict(asyncio.Queue)
        """The tokens of each group that is complete, by step."""

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self._replay.groups) // self._groups

    async def run(self) -> None:
        """Make all steps."""
        serving = [asyncio.create_task(self._service.run()), asyncio.create_task(self._fleet.run())]
        async with asyncio.TaskGroup() as generations:
            for step in range(self.steps):
                generations.create_task(self._generate(step))
            for step in range(self.steps):
                await self._train(step)
        for task in serving:
            task.cancel()
        await asyncio.wait(serving)
        await self._engines.close()

    async def _generate(self, step: int) -> None:
        async with self._published:
            await self._published.wait_for(lambda: self._version >= oldest_version(step, AHEAD))
        requests, _ = requests_of(ARMS["pull"], self._replay, step, self._groups)
        groups: defaultdict[int, list[int]] = defaultdict(list)
        async for made in self._service.generate(requests, step=step):
            request = requests[made.sample.request_id]
            self._tell(made, request, step)
            group = groups[request.group_id]
            group.append(len(request.prompt_ids) + len(made.sample.response_ids))
            if len(group) == GROUP_SIZE:
                self._complete[step].put_nowait(sum(group))

    def _tell(self, made: Generated, request: Request, step: int) -> None:
        event = Event(task=EventKind.SAMPLE, actor="engine", start=made.start, end=made.end, step=step)
        event.tokens = len(made.sample.response_ids)
        event.info = {"group": request.group_id, "prompt_tokens": len(request.prompt_ids)}
        self._log.emit(event)

    async def _train(self, step: int) -> None:
        """Train on each group as soon as it is complete."""
        with self._log.span(EventKind.STEP, "trainer", step=step):
            for _ in range(self._groups):
                tokens = await self._complete[step].get()
                with self._log.span(EventKind.ACTOR, "trainer", step=step):
                    await asyncio.sleep(tokens / self._pace)
        async with self._published:
            self._version += 1
            self._published.notify_all()

    def _see(self, event: Event) -> None:
        if event.task == EventKind.STEP:
            self.engine_s += len(self._service.engines) * (event.end - self.ends[-1])
            self.ends.append(event.end)
        elif event.task == EventKind.SCALE:
            self.asked.append(len(self.ends) - 2)
            print(f"{event.end:7.0f} s  step {self.asked[-1]}  {event.info['text']}", flush=True)

    @property
    def played(self) -> "Played":
        """What came of it."""
        return Played([after - before for before, after in pairwise(self.ends)], self.asked, self.engine_s)


@dataclass(frozen=True, slots=True)
class Played:
    """A run that has ended."""

    seconds: list[float]
    """Of each step."""
    changes: list[int]
    """See `changes` of the module."""
    engine_s: float


def growing(seed: int, *, steps: int, groups: int) -> Replay:
    """The lengths of a run, which grow linearly to twice those of the workload."""
    drawn = Replay.of(open_workload(WORKLOAD).sample(steps=steps, groups=groups, group_size=GROUP_SIZE, seed=seed))
    factor = LONGEST / drawn.longest_response

    def growth(group: int) -> float:
        return 1 + (group // groups) / max(1, steps - 1)

    return Replay(
        [[script.scaled(factor * growth(number)) for script in group] for number, group in enumerate(drawn.groups)]
    )


def play(seed: int, workers: int, most: int | None, steps: int, groups: int, trainer_tokens_per_s: float) -> Played:
    """Play the lengths of a seed."""
    replay = growing(seed, steps=steps, groups=groups)

    async def played() -> Played:
        run = Run(replay, groups, workers=workers, most=most, trainer_tokens_per_s=trainer_tokens_per_s)
        await run.run()
        return run.played

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(played())


def beside(elastic: Played, static: Sequence[Played]) -> dict[str, Any]:
    """See the module. `static`: the runs with one, two … engines."""
    steps = len(elastic.seconds)
    begins = [0, *(step + 1 for step in elastic.changes), steps]
    best, right = list[int](), list[float]()
    for first, last in pairwise(begins):
        seconds = [sum(played.seconds[first:last]) for played in static]
        chosen = next(n for n, each in enumerate(seconds) if each <= (1 + ALIKE) * min(seconds))
        best.append(chosen + 1)
        right += static[chosen].seconds[first:last]

    def ratio(first: int, last: int) -> float | None:
        return round(sum(elastic.seconds[first:last]) / sum(right[first:last]), 4) if first < last else None

    settled = begins[-2] + 1
    return {
        "changes": elastic.changes,
        "best": best,
        "phases": [ratio(first, last) for first, last in pairwise(begins)],
        "step_over_right": {"run": ratio(0, steps), "settled": ratio(settled, steps)},
        "settled_steps": steps - settled,
        "engine_s_share": round(elastic.engine_s / static[-1].engine_s, 4),
    }


def compare(*, steps: int, groups: int, seeds: int, trainer_tokens_per_s: float) -> list[dict[str, Any]]:
    """See the module; two runs are played at a time."""
    kinds = [(workers, None) for workers in range(1, MOST + 1)] + [(1, MOST)]
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:  # torch may have threads here
        runs = [
            [
                processes.submit(play, seed, workers, most, steps, groups, trainer_tokens_per_s)
                for workers, most in kinds
            ]
            for seed in range(seeds)
        ]
        found = []
        for seed, of_seed in enumerate(runs):
            *static, elastic = (run.result() for run in of_seed)
            found.append(beside(elastic, static))
            print(f"seed {seed}: {found[-1]}", flush=True)
    return found


def main(
    steps: int = 30, groups: int = 128, seeds: int = 3, trainer_tokens_per_s: float = TRAINER_TOKENS_PER_S
) -> None:
    """Compare."""
    found = compare(steps=steps, groups=groups, seeds=seeds, trainer_tokens_per_s=trainer_tokens_per_s)
    print(json.dumps({"virtual": found}))


if __name__ == "__main__":
    typer.run(main)
