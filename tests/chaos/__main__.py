"""Plays rounds: `python -m tests.chaos [--rounds N] [--seed S] [--round N]... [--jobs J]`.

Each round prints one line: what was harmed when, and how the run took it. A failed round also prints the command that
repeats it, and its files are kept. The last line is a JSON object. It counts a fault as planned but not done if the run
ended before the fault's moment, or if its victim was not there.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from tests.chaos.plan import COLOCATED, Plan, make_plan
from tests.chaos.processes import adopt_orphans, gone
from tests.chaos.round import Outcome, Round, drive, no_outcome, prepare, remove

_ENOUGH = 0.8
"""The least part of the planned faults that must be done: rounds in which nothing happens prove nothing."""


def main() -> int:
    """Play the rounds. The exit code is 1 if a round has failed."""
    options = _options()
    torch.set_num_threads(1)
    directory = Path(tempfile.mkdtemp(prefix="c", dir="/tmp"))
    model, prompts = prepare(directory)
    reference = _reference(directory, model, prompts)
    rounds = options.round or range(options.rounds)
    plans = [make_plan(options.seed, round) for round in rounds]
    outcomes = []
    for plan, outcome in play(plans, directory, model, prompts, reference, jobs=options.jobs):
        outcomes.append(outcome)
        _say(plan, outcome)
    counts = {
        "rows_wrong": sum(bool(outcome.wrong) for outcome in outcomes),
        "hung": sum(bool(outcome.hung) for outcome in outcomes),
        "left_behind": sum(bool(outcome.left) for outcome in outcomes),
        "exposed": sum(bool(outcome.exposed) for outcome in outcomes),
    }
    planned = sum(len(plan.faults) for plan in plans)
    done = sum(outcome.faults_done for outcome in outcomes)
    failed = any(counts.values()) or done < _ENOUGH * planned
    if not failed:
        remove(directory)
    faults = {"faults_planned": planned, "faults_done": done}
    print(json.dumps({"bench": "chaos", "rounds": len(outcomes), **counts, **faults}))
    return int(failed)


def play(
    plans: Iterable[Plan], directory: Path, model: Path, prompts: Path, reference: Path, *, jobs: int
) -> Iterator[tuple[Plan, Outcome]]:
    """Play the rounds of `plans`, `jobs` at a time, and yield them as they end. The caller must have one thread."""
    waiting, playing = list(plans), dict[int, tuple[Plan, Path]]()
    try:
        while waiting or playing:
            while waiting and len(playing) < jobs:
                plan = waiting.pop(0)
                place = directory / f"{plan.round}"
                place.mkdir(mode=0o700)
                playing[_fork(Round(plan, model, prompts, reference, place), place)] = plan, place
            pid, _ = os.wait()
            if pid in playing:
                plan, place = playing.pop(pid)
                yield plan, _read(plan, place)
    finally:
        for pid in playing:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _fork(round: Round, place: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        (place / "outcome.json").write_bytes(msgspec.json.encode(round.play()))
    except BaseException:
        traceback.print_exc()
        gone(0.0)
    finally:
        sys.stderr.flush()
        os._exit(0)


def _read(plan: Plan, place: Path) -> Outcome:
    try:
        outcome = msgspec.json.decode((place / "outcome.json").read_bytes(), type=Outcome)
    except FileNotFoundError:
        return msgspec.structs.replace(no_outcome(plan), wrong=["the round itself has failed"])
    if not outcome.failed:
        remove(place)
    return outcome


def _reference(directory: Path, model: Path, prompts: Path) -> Path:
    """Make the reference: a run without faults."""
    plan = Plan(seed=0, round=-1, mode=COLOCATED, replicas=1, rollouts=1, daemons=False, faults=(), controllers=1)
    run = directory / "reference"
    adopt_orphans()
    pid = os.fork()
    if not pid:
        drive(plan.config(run, model, prompts), directory / "reference.log", False)
    _, status = os.waitpid(pid, 0)
    if status:
        sys.exit((directory / "reference.log").read_text())
    return run


def _say(plan: Plan, outcome: Outcome) -> None:
    done = "; ".join(outcome.done) or "nothing was there to be harmed"
    print(f"{outcome.plan}\n    done: {done}; {'FAILED' if outcome.failed else 'as it should be'}, {outcome.seconds} s")
    for kind in ("wrong", "hung", "left", "exposed"):
        for problem in getattr(outcome, kind):
            print(f"    {kind}: {problem}")
    if outcome.failed:
        print(f"    repeat it: python -m tests.chaos --seed {plan.seed} --round {plan.round}")
    sys.stdout.flush()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--rounds", type=int, default=100, help="how many, from number 0 on")
    parser.add_argument("--seed", type=int, default=2, help="of their plans")
    parser.add_argument("--round", type=int, action="append", help="the number of one to play, and no others")
    parser.add_argument("--jobs", type=int, default=2, help="rounds at a time")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
