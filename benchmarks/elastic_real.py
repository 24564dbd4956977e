"""Real runs whose number of engines changes: what a join costs the others, and whether a notice loses tokens.

    python benchmarks/elastic_real.py [--steps 16]

Four separated runs play the same lengths, which grow to twice their start, in fp32 with a tiny model. Their workers are
processes on Ray, of one thread each:

    alone       one engine throughout
    right       two engines throughout
    elastic     begins with one engine, and may have two
    preempted   begins with two; one gets SIGTERM in its second step, and the other one in its fourth

The runs are synchronous: the trainer works while no engine does, and leaves its core to a second engine. The join lasts
from the start of the new process until a second after its first response. The last line is JSON:

    exposed_s           Seconds of the join in which the older engine, or the trainer, stood still. A time between two
                        steps of that engine that is longer than `STILL` usual steps counts, less a usual one; so does
                        what the trainer waits for weights beyond its usual time. The same seconds of the run `alone`,
                        in the steps of the join, are in `exposed_alone_s`: what happens without a join, too.
    join_steps_s        By how much the steps of the join took longer than those of `alone`. The new process takes time
                        on the two cores while it starts; later the new engine shares the work.
    settled_over_right  Seconds of the steps after the join, beside those of `right`.
    tokens_lost         Tokens that the engines of `preempted` have made in all, less those of all of its responses.
    moved, kept         Responses that went on elsewhere, and the tokens with which they did.
    differing           For each run, the responses that are not token for token those of `right`, are missing or twice.
"""

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import typer
from elastic_engine import CONTINUED, DECODE, RESPONSE
from pipeline_turn import training

from tailrace.conformance.tiny import write_tiny_model
from tailrace.events import Event, read_events
from tailrace.registers import run_files
from tailrace.registers.events import EventKind
from tailrace.workloads.files import write_trace
from tailrace.workloads.replay import Replay, Script, Turn
from tailrace.workloads.trace import Provenance

HERE = Path(__file__).parent
BUILD = HERE.parent / "build" / "bench-elastic"

GROUPS, GROUP_SIZE, SLOTS = 4, 4, 4
PROMPT_TOKENS, MEAN_TOKENS = 16, 160
STILL = 5.0
"""Usual steps. A longer time between two steps is one in which an engine stood still."""
LIMIT_S = 600.0
"""Seconds that a run may take."""
LOOK_S = 0.02
"""Seconds between two looks at the events of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A kind of run."""

    workers: int
    most: int | None = None
    """Engines at most, where the run chooses their number."""
    notices: Mapping[str, int] = field(default_factory=dict)
    """The workers that get SIGTERM, each at the first response of a step."""


ARMS = {
    "alone": Arm(workers=1),
    "right": Arm(workers=2),
    "elastic": Arm(workers=1, most=2),
    "preempted": Arm(workers=2, notices={"rollout-1": 1, "rollout-0": 3}),
}


def lengths(steps: int) -> Replay:
    """Responses that grow to twice their length over the steps."""
    chance = random.Random(0)

    def script(step: int) -> Script:
        tokens = round(MEAN_TOKENS * (1 + step / max(1, steps - 1)) * chance.uniform(0.5, 1.5))
        return Script(prompt_tokens=PROMPT_TOKENS, turns=(Turn(generated_tokens=tokens),))

    return Replay([[script(step) for _ in range(GROUP_SIZE)] for step in range(steps) for _ in range(GROUPS)])


def config_of(arm: Arm, directory: Path, model: Path, trace: Path, replay: Replay) -> dict[str, Any]:
    """The configuration of a run."""
    steps = len(replay.groups) // GROUPS
    free = {"cpus": 0, "threads": 1}
    rollout = {**free, "workers": arm.workers} | ({} if arm.most is None else {"max_workers": arm.most})
    options = {"dtype": "float32", "max_batch_size": SLOTS, "kv_cache_gib": 0.1}
    return {
        "output_dir": str(directory),
        "model": {"path": str(model)},
        "prompts": {"source": {"type": "trace", "path": str(trace)}, "held_out": 0, "shuffle": False},
        "rewards": {"grader": {"type": "exact"}, "workers": 1},
        "algorithm": {"type": "grpo", "group_size": GROUP_SIZE},
        "sampling": {"max_new_tokens": replay.longest_response, "keep_special_tokens": True},
        "engine": {"type": "adapter", "path": "elastic_engine.make_engine", "options": options},
        "trainer": {"steps": steps, "train_batch_size": GROUPS * GROUP_SIZE, "precision": "fp32"},
        "pipeline": {"placement": "separated", "replay": str(trace)},
        "cluster": {"rollout": rollout, "trainer": free, "reward": free},
        "checkpoint": {"every": 10**6},
        "observe": {"tensorboard": False, "sample_groups": 0},
    }


def run(name: str, model: Path, trace: Path, replay: Replay) -> list[Event]:
    """Train, and return the events.

    Raises:
        RuntimeError: the run failed.
        subprocess.TimeoutExpired: it took too long.
    """
    arm, directory = ARMS[name], BUILD / name
    config = json.dumps(config_of(arm, directory, model, trace, replay))
    with training(directory, config, warm_up=1, steps=len(replay.groups) // GROUPS) as process:
        _watch(process, directory / run_files.EVENTS, dict(arm.notices))
    return read_events(directory / run_files.EVENTS)


def _watch(process: "subprocess.Popen[bytes]", path: Path, notices: dict[str, int]) -> None:
    """Wait for the end of a run, and send its workers their notices.

    Raises:
        RuntimeError: the run ended before a notice was due.
        subprocess.TimeoutExpired: the run took too long.
    """
    until, pids = time.monotonic() + LIMIT_S, dict[str, int]()
    with _followed(path) as events:
        while notices and process.poll() is None and time.monotonic() < until:
            for event in events():
                if event.task == EventKind.WORKER_STARTED:
                    pids[event.actor] = event.info["pid"]
                elif event.task == EventKind.SAMPLE:
                    for worker in [worker for worker, step in notices.items() if step == event.step]:
                        del notices[worker]
                        os.kill(pids[worker], signal.SIGTERM)
            time.sleep(LOOK_S)
    process.wait(max(0.0, until - time.monotonic()))
    if notices and process.returncode == 0:
        raise RuntimeError(f"the run ended before the steps of the notices {notices}: give it more steps")


@contextmanager
def _followed(path: Path) -> Iterator[Callable[[], list[Event]]]:
    """Within the block, a function that returns the events since its last call."""
    path.touch()
    with path.open("rb") as file:
        rest = b""

        def new() -> list[Event]:
            nonlocal rest
            *lines, rest = (rest + file.read()).split(b"\n")
            return [msgspec.json.decode(line, type=Event) for line in lines]

        yield new


def _of(events: Sequence[Event], task: str) -> list[Event]:
    return [event for event in events if event.task == task]


@dataclass(frozen=True, slots=True)
class Span:
    """Some time of a run, in its seconds."""

    start: float
    end: float

    def has(self, event: Event) -> bool:
        """Whether a part of the event is within it."""
        return event.start < self.end and event.end > self.start


def steps_of(events: Sequence[Event]) -> list[Span]:
    """The steps but the first, each from the end of the one before it."""
    ends = [event.end for event in _of(events, EventKind.STEP)]
    return [Span(before, after) for before, after in pairwise(ends)]


def join_of(events: Sequence[Event], worker: str) -> Span:
    """From the start of a worker's process until a second after its first response.

    Raises:
        RuntimeError: it has not joined.
    """
    started = [event.start for event in _of(events, EventKind.WORKER_STARTED) if event.actor == worker]
    answered = [event.end for event in _of(events, EventKind.SAMPLE) if event.worker == worker]
    if not started or not answered:
        raise RuntimeError(f"{worker} has not joined the run; see {BUILD / 'elastic'}, or give it more --steps")
    return Span(started[0], min(answered) + 1.0)


def still_s(events: Sequence[Event], span: Span, *, worker: str) -> float:
    """Seconds of a span in which an engine, or the trainer, stood still; see `exposed_s` of the module."""
    decoded = [event for event in _of(events, DECODE) if event.worker == worker and event.metrics["steps"]]
    usual_s = statistics.median((event.end - event.start) / event.metrics["steps"] for event in decoded)
    longest = [event.metrics["longest_s"] for event in decoded if span.has(event)]
    waits = _of(events, EventKind.WEIGHTS_WAIT)
    usual_wait_s = statistics.median(event.end - event.start for event in waits)
    waited = [max(0.0, event.end - event.start - usual_wait_s) for event in waits if span.has(event)]
    return sum(seconds - usual_s for seconds in longest if seconds > STILL * usual_s) + sum(waited)


def tokens_lost(events: Sequence[Event]) -> int:
    """See the module."""
    made: dict[str, float] = {}
    for event in _of(events, DECODE):
        made[event.worker] = max(made.get(event.worker, 0.0), event.metrics["generated"])
    return round(sum(made.values())) - sum(event.tokens or 0 for event in _of(events, EventKind.SAMPLE))


def differing(events: Sequence[Event], right: Sequence[Event]) -> int:
    """See the module."""

    def responses(of: Sequence[Event]) -> Counter[tuple[int, int, str]]:
        return Counter((event.info["group"], event.info["sample"], event.info["digest"]) for event in _of(of, RESPONSE))

    ours, theirs = responses(events), responses(right)
    return ((ours - theirs) + (theirs - ours)).total()


def figures(runs: Mapping[str, Sequence[Event]]) -> dict[str, Any]:
    """See the module."""
    elastic, alone, preempted = runs["elastic"], runs["alone"], runs["preempted"]
    join = join_of(elastic, "rollout-1")
    steps = {name: steps_of(events) for name, events in runs.items()}
    joining = [n for n, step in enumerate(steps["elastic"]) if step.start < join.end and step.end > join.start]
    settled = range(joining[-1] + 1, len(steps["elastic"]))

    def seconds(name: str, numbers: Iterable[int]) -> float:
        return sum(steps[name][number].end - steps[name][number].start for number in numbers)

    beside = Span(steps["alone"][joining[0]].start, steps["alone"][joining[-1]].end)
    continued = _of(preempted, CONTINUED)
    return {
        "exposed_s": round(still_s(elastic, join, worker="rollout-0"), 3),
        "exposed_alone_s": round(still_s(alone, beside, worker="rollout-0"), 3),
        "join_s": round(join.end - join.start, 1),
        "join_steps_s": round(seconds("elastic", joining) - seconds("alone", joining), 2),
        "settled_steps": len(settled),
        "settled_over_right": round(seconds("elastic", settled) / seconds("right", settled), 3) if settled else None,
        "tokens_lost": tokens_lost(preempted),
        "moved": len(continued),
        "kept": sum(event.tokens or 0 for event in continued),
        "differing": {name: differing(events, runs["right"]) for name, events in runs.items() if name != "right"},
        "run_s": {name: round(seconds(name, range(len(of))), 1) for name, of in steps.items()},
        "changes": {
            name: [event.info["text"] for event in _of(events, EventKind.SCALE)]
            for name, events in runs.items()
            if name in ("elastic", "preempted")
        },
    }


def measure(steps: int) -> dict[str, Any]:
    """Make all runs."""
    shutil.rmtree(BUILD, ignore_errors=True)
    model = write_tiny_model("llama", BUILD / "model", head_dim=64)
    replay, trace = lengths(steps), BUILD / "lengths.parquet"
    write_trace(replay.trace(Provenance(source="made"), groups_per_step=GROUPS), trace)
    runs = {}
    for name in ARMS:
        runs[name] = run(name, model, trace, replay)
        print(f"{name}: {len(_of(runs[name], EventKind.STEP))} steps", flush=True)
    return figures(runs)


def main(steps: int = 16) -> None:
    """Measure."""
    print(json.dumps(measure(steps)))


if __name__ == "__main__":
    typer.run(main)
