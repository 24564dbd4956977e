"""The figures of a turn of `make bench-pipeline`, from its events."""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tailrace.events import Event
from tailrace.registers.events import EventKind

POOLS = {"rollout-0": "rollout", "trainer": "trainer"}
"""The pools of the workers whose time is looked at."""


class Window(NamedTuple):
    """Seconds on the run's clock: from the end of the last warm-up step to that of the last step."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Length of the window."""
        return self.end - self.start

    def of(self, event: Event) -> float:
        """Return the seconds of `event` inside the window."""
        return max(0.0, min(event.end, self.end) - max(event.start, self.start))


class Turn:
    """The events of one run."""

    def __init__(self, directory: Path, warm_up: int) -> None:
        """`warm_up`: steps that do not count."""
        lines = (directory / "events.jsonl").read_bytes().splitlines()
        self.events: list[Event] = [msgspec.json.decode(line, type=Event) for line in lines]
        self.cpu: dict[str, float] = json.loads((directory / "cpu.json").read_text())
        steps = [event for event in self.events if event.task == EventKind.STEP]
        self.steps: Sequence[Event] = steps[warm_up:]
        """The steps that count."""
        self.window = Window(steps[warm_up - 1].end, steps[-1].end)

    @property
    def samples_per_s(self) -> float:
        """Samples trained on per second."""
        return sum(step.samples or 0 for step in self.steps) / self.window.seconds

    def share(self, pool: str, *states: str) -> float:
        """Return the share of a pool's time in these states of its activity."""
        inside = {state: 0.0 for state in ("busy", "weights", "data", "idle")}
        for event in self.events:
            if event.task == EventKind.ACTIVITY and POOLS.get(event.worker) == pool and event.end > event.start:
                part = self.window.of(event) / (event.end - event.start)
                for state, seconds in event.metrics.items():
                    inside[state] += part * seconds
        return sum(inside[state] for state in states) / sum(inside.values())

    def busy_s(self, pool: str) -> float:
        """Return the seconds of a step in which the pool works."""
        return self.share(pool, "busy") * self.window.seconds / len(self.steps)

    @property
    def balance(self) -> float:
        """Seconds of generating over seconds of training, for a sequential run."""
        return self.busy_s("rollout") / self.busy_s("trainer")

    @property
    def idle(self) -> dict[str, float]:
        """The share of each pool's time in which it does not work, for whatever reason."""
        return {pool: 1 - self.share(pool, "busy") for pool in POOLS.values()}

    @property
    def weight_sync(self) -> float:
        """The share of time in which a pool waits for weights, or is stopped to hand them on or to install them.

        The shares of both pools are added up, so this is at least the share in which either does.
        """
        stopped = sum(
            self.window.of(event)
            for event in self.events
            if event.task in (EventKind.WEIGHTS_PUBLISH, EventKind.UPDATE_WEIGHTS)
        )
        waiting = sum(self.share(pool, "weights") for pool in POOLS.values())
        return waiting + stopped / self.window.seconds

    def check_cores(self, cores: dict[str, int]) -> None:
        """Check that each pool ran on its core, as the system says.

        Raises:
            RuntimeError: a pool did not.
        """
        seen = {
            POOLS[event.actor]: event.info["cores"]
            for event in self.events
            if event.task == EventKind.WORKER_STARTED and event.actor in POOLS
        }
        wanted = {pool: [core] for pool, core in cores.items()}
        if seen != wanted:
            raise RuntimeError(f"the pools ran on the cores {seen}; wanted {wanted}")

    def check_tokens(self, tokens: Collection[int]) -> None:
        """Check that the responses that were trained on had so many tokens, step by step.

        Raises:
            RuntimeError: they had others.
        """
        seen = [step.tokens for step in self.steps]
        if seen != list(tokens):
            raise RuntimeError(f"steps trained on {seen} tokens; wanted {list(tokens)}")
