"""The plan of a round: the run, and which of its processes is harmed, when and how."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailrace.config.run import RunConfig
from tests.helpers.runs import small_run

STEPS = 4
ROWS_PER_STEP = 8
_DRIVER = ("driver", "grader")
_QUEUE = ("controller", "unit-0", "unit-1")
_RAY = ("gcs_server", "raylet", "dashboard agent", "runtime env agent", "monitor", "dashboard")
_WORKERS = ("trainer", "rollout-0", "reward-0")
_AROUND = ("broker", "broker's guard", "cleanup", "keeper", "guard")
_SEPARATED = (*_DRIVER, *_QUEUE, *_RAY, *_WORKERS, *_AROUND)
_MOMENTS = {"processes": 24, "event": 100, "weights": 6, "checkpoint": 2, "export": 1, "end": 1}
"""The highest number that is chosen per kind of moment: the n-th process, the n-th event, …

Every run with workers reaches all of them.
"""
_COLOCATED_MOMENTS = {"processes": 2, "event": 80, "checkpoint": 2, "export": 1}
"""The same for a colocated run, which has few processes and transfers no weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """The way in which a run works."""

    name: str
    changes: dict[str, Any]
    """The sections of its recipe that differ."""
    roles: tuple[str, ...]
    """The roles of its processes."""
    staleness: int = 0

    @property
    def is_exact(self) -> bool:
        """Whether the run equals the uninterrupted run bit for bit.

        A run does not if its result depends on when weights arrive.
        """
        return self.staleness == 0


def _separated(name: str, weights: str, staleness: int, streaming: bool) -> Mode:
    pipeline = {"placement": "separated", "max_staleness": staleness, "streaming": streaming, "in_order": streaming}
    return Mode(
        name=name,
        changes={"pipeline": pipeline, "weights": {"mode": weights}},
        roles=_SEPARATED,
        staleness=staleness,
    )


COLOCATED = Mode(name="colocated", changes={"queue": {"type": "local"}}, roles=_DRIVER)
MODES = (
    COLOCATED,
    _separated("sequential", "synchronous", 0, False),
    Mode(
        name="colocated, queue of processes",
        changes={"pipeline": {"streaming": True, "in_order": True}},
        roles=(*_DRIVER, *_QUEUE),
    ),
    _separated("streaming", "synchronous", 0, True),
    _separated("one step ahead", "delayed", 1, False),
    _separated("fully asynchronous", "in_flight", 1, True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Harm to one process."""

    moment: str
    number: int
    victim: str
    how: str
    """`kill`, `stop` for ever, `pause` for some seconds, or `interrupt` as Ctrl-C does."""
    pause_s: float

    @property
    def may_end_the_run(self) -> bool:
        """Whether the run may end with an error after this fault: a pause is shorter than every limit."""
        return self.how != "pause"

    def __str__(self) -> str:
        pause = f"paused for {self.pause_s:.1f} s"
        how = {"kill": "killed", "stop": "stopped", "pause": pause, "interrupt": "interrupted"}[self.how]
        return f"{self.victim} {how} at {self.moment} {self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The run and the faults of one round."""

    seed: int
    round: int
    mode: Mode
    replicas: int
    rollouts: int
    daemons: bool
    """Whether graders leave processes in sessions of their own."""
    faults: tuple[Fault, ...]
    controllers: int
    """Those of a queue of processes."""

    def __str__(self) -> str:
        extras = [f"{self.rollouts} rollout workers"] * (self.rollouts > 1) + ["daemons of graders"] * self.daemons
        extras += [f"{self.controllers} controllers"] * (self.controllers > 1)
        what = ", ".join([self.mode.name, f"{self.replicas} replicas" if self.replicas > 1 else "1 replica", *extras])
        return f"round {self.round} ({what}): {'; '.join(map(str, self.faults))}"

    def config(self, output_dir: Path, model: Path, prompts: Path) -> RunConfig:
        """The configuration of the round's run."""
        function = "daemonizing" if self.daemons else "digit_fraction"
        pools: dict[str, Any] = {kind: {"cpus": 0} for kind in ("rollout", "trainer", "reward")}
        pools["rollout"] |= {"workers": self.rollouts}
        queue: dict[str, Any] = {"type": "service", "controllers": self.controllers, "units": 2 * self.controllers}
        queue |= {"replicas": self.replicas, "unit_limit_s": 5.0, "client_limit_s": 8.0}
        changes = {
            "queue": queue,
            "cluster": {**pools, "start_limit_s": 60.0, "heartbeat_limit_s": 8.0, "max_deaths": 50},
            "rewards": {
                "grader": {"type": "function", "path": f"tests.chaos.graders.{function}"},
                "workers": 1,
                "timeout_s": 5.0,
                "retries": 5,
            },
            "evaluation": {"every": 100},
            **self.mode.changes,
        }
        if "placement" not in changes.get("pipeline", {}):
            del changes["cluster"]
        return small_run(output_dir, model, prompts, trainer__steps=STEPS, **changes)


def make_plan(seed: int, round: int) -> Plan:
    """Make the plan of one round."""
    choose = random.Random(f"{seed} {round}")
    mode = MODES[round % len(MODES)]
    return Plan(
        seed=seed,
        round=round,
        mode=mode,
        replicas=choose.choice((1, 2)),
        rollouts=choose.choice((1, 2)),
        daemons=choose.random() < 0.2,
        faults=tuple(_fault(choose, mode) for _ in range(choose.choice((1, 1, 1, 2)))),
        controllers=1 if mode is COLOCATED else choose.choice((1, 1, 2)),
    )


def _fault(choose: random.Random, mode: Mode) -> Fault:
    moments = _MOMENTS if mode.roles is _SEPARATED else _COLOCATED_MOMENTS
    moment = choose.choice(list(moments))
    victim = choose.choice((*mode.roles, *["driver"] * (len(mode.roles) // 8)))  # its death has the run resumed
    stop = "interrupt" if victim == "driver" else "stop"  # nothing else could end a stopped driver
    how = choose.choice(("kill", "kill", stop, "pause"))
    return Fault(
        moment=moment,
        number=choose.randint(1, moments[moment]),
        victim=victim,
        how=how,
        pause_s=choose.uniform(0.5, 4.0),
    )
