"""A few rounds of `make chaos`, and what it reports of runs that are not as they should be."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.plan import MODES, make_plan
from tests.chaos.processes import open_to_others
from tests.helpers.effort import LONG

SEED = 2
ROUNDS = (0, 38, 45) if LONG else (0,)
"""Rounds that kill a driver, one of two controllers and a raylet."""


def test_a_plan_follows_from_seed_and_number_alone() -> None:
    assert [str(make_plan(SEED, number)) for number in range(20)] == [str(make_plan(SEED, n)) for n in range(20)]
    assert str(make_plan(SEED, 5)) != str(make_plan(SEED + 1, 5))


def test_a_hundred_rounds_have_every_mode_kind_of_process_moment_and_harm() -> None:
    plans = [make_plan(SEED, number) for number in range(100)]
    faults = [fault for plan in plans for fault in plan.faults]
    assert {plan.mode.name for plan in plans} == {mode.name for mode in MODES}
    assert {fault.victim for fault in faults} == {role for mode in MODES for role in mode.roles}
    assert {fault.moment for fault in faults} == {"processes", "event", "weights", "checkpoint", "export", "end"}
    assert {fault.how for fault in faults} == {"kill", "stop", "pause", "interrupt"}
    assert {plan.replicas for plan in plans} == {1, 2}
    assert {plan.controllers for plan in plans} == {1, 2}


@pytest.mark.parametrize(("mode", "is_open"), [(0o700, False), (0o750, True), (0o701, True), (0o777, True)])
def test_what_others_may_enter_is_seen(tmp_path: Path, mode: int, is_open: bool) -> None:
    directory = tmp_path / "directory"
    directory.mkdir()
    directory.chmod(mode)
    assert bool(list(open_to_others([tmp_path]))) is is_open


def test_rounds_of_chaos_go_as_they_should() -> None:
    """Play one round each of a colocated run, a run with queue processes, and a run of workers on Ray."""
    rounds = [word for number in ROUNDS for word in ("--round", str(number))]
    command = [sys.executable, "-m", "tests.chaos", "--seed", str(SEED), "--jobs", "1", *rounds]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540)
    last = json.loads(done.stdout.splitlines()[-1])
    faults = {"faults_planned": len(ROUNDS), "faults_done": len(ROUNDS)}
    harm = {"rows_wrong": 0, "hung": 0, "left_behind": 0, "exposed": 0}
    assert last == {"bench": "chaos", "rounds": len(ROUNDS)} | harm | faults, done.stdout + done.stderr
    assert done.returncode == 0
