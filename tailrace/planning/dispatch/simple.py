"""Policies that know no lengths."""

import random
from collections.abc import Sequence
from heapq import heappop, heappush

from tailrace.planning.dispatch.base import EngineState, Job, Placement
from tailrace.planning.dispatch.seconds import step_s


class Pull:
    """An engine takes the next jobs in their order as it gets room for them."""

    name = "pull"
    plans = False

    def place(self, jobs: Sequence[Job], engines: Sequence[EngineState]) -> Placement:
        """See `Policy`. Of engines with room, even for a part alone, that with the shortest steps then takes a job.

        So all are about as quick where there is room for all jobs: a slow engine takes fewer. Of equals, that with the
        most room takes it.
        """
        free = [engine.free for engine in engines]
        sizes = [len(engine.running) for engine in engines]
        tokens = [sum(context for context, _ in engine.running) for engine in engines]
        places: list[list[int]] = [[] for _ in engines]
        line: list[tuple[float, int, int]] = []

        def queue_up(index: int, job: Job) -> None:
            if free[index] > 0:
                size, held = sizes[index] + job.samples, tokens[index] + job.samples * job.prompt_tokens
                heappush(line, (step_s(engines[index], size, held), -free[index], index))

        for index in range(len(engines)) if jobs else ():
            queue_up(index, jobs[0])
        for number, job in enumerate(jobs):
            if not line:
                return Placement(places, list(range(number, len(jobs))))
            _, _, index = heappop(line)
            places[index].append(number)
            free[index] -= job.samples
            sizes[index] += job.samples
            tokens[index] += job.samples * job.prompt_tokens
            queue_up(index, jobs[min(number + 1, len(jobs) - 1)])
        return Placement(places, [])


class RoundRobin:
    """Each engine gets the next job in turn."""

    name = "round_robin"
    plans = False

    def __init__(self) -> None:
        self._next = 0

    def place(self, jobs: Sequence[Job], engines: Sequence[EngineState]) -> Placement:
        """See `Policy`."""
        places: list[list[int]] = [[] for _ in engines]
        for number in range(len(jobs)):
            places[(self._next + number) % len(engines)].append(number)
        self._next = (self._next + len(jobs)) % len(engines)
        return Placement(places, [])


class LeastLoaded:
    """Each job goes to the engine with the fewest unfinished sequences for its room."""

    name = "least_loaded"
    plans = False

    def place(self, jobs: Sequence[Job], engines: Sequence[EngineState]) -> Placement:
        """See `Policy`."""
        load = [len(engine.running) for engine in engines]
        room = [engine.room for engine in engines]
        places: list[list[int]] = [[] for _ in engines]
        for number, job in enumerate(jobs):
            index = min(range(len(engines)), key=lambda i: load[i] / room[i])
            places[index].append(number)
            load[index] += job.samples
        return Placement(places, [])


class Random:
    """Each job goes to any engine, with equal chances: what the others are measured against (StreamRL, section 7)."""

    name = "random"
    plans = False

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def place(self, jobs: Sequence[Job], engines: Sequence[EngineState]) -> Placement:
        """See `Policy`."""
        places: list[list[int]] = [[] for _ in engines]
        for number in range(len(jobs)):
            places[self._random.randrange(len(engines))].append(number)
        return Placement(places, [])
