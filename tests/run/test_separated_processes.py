"""Runs whose workers are processes on Ray: what tests/run/test_separated.py cannot show."""

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from tailrace.config.run import RunConfig
from tailrace.errors import ConfigError
from tailrace.events import Event, EventLog
from tailrace.run.separated import RemoteLearner
from tailrace.run.train import train
from tests.conftest import TinyModel
from tests.helpers.effort import long_only
from tests.helpers.runs import assert_same_run, small_run, steps_of, write_prompts
from tests.helpers.separated_runs import FULLY_ASYNCHRONOUS, KL, SYNCHRONOUS, hold_trainer, of


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts.jsonl")


def test_pools_that_no_machine_can_hold_are_refused_before_anything_is_written(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, connected_to_ray: None
) -> None:
    run = tmp_path / "run"
    cluster = {"rollout": {"gpus": 3}}
    config = small_run(run, tiny_model("llama"), prompts, pipeline=FULLY_ASYNCHRONOUS, cluster=cluster)
    with pytest.raises(ConfigError, match=re.escape("cluster.rollout asks for 1 CPU, 3 GPU")):
        train(config, resume=False)
    assert not run.exists()


@long_only
def test_a_trainer_whose_device_hangs_is_killed_and_changes_nothing(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, connected_to_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(small_run(whole, tiny_model("llama"), prompts), resume=False)
    cluster: dict[str, Any] = {kind: {"cpus": 0} for kind in ("rollout", "trainer", "reward")}
    cluster["computation_limit_s"] = 10.0
    config = small_run(cut, tiny_model("llama"), prompts, pipeline=SYNCHRONOUS, cluster=cluster)
    hold_trainer(monkeypatch, "in_export")
    assert train(config, resume=False) == 0
    assert [event.step for event in steps_of(cut)] == [0, 1, 2, 3]
    [death] = of(cut, "worker_died")
    assert death.actor == "trainer"
    assert "a computation has taken longer than cluster.computation_limit_s (10 s)" in death.info["how"]
    assert_same_run(whole, cut)


@long_only
def test_a_run_survives_the_death_of_every_kind_of_worker_in_one_go(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, connected_to_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    config = small_run(
        run,
        tiny_model("llama"),
        prompts,
        pipeline=FULLY_ASYNCHRONOUS,
        trainer__steps=8,
        evaluation={"every": 100},
        cluster={kind: {"cpus": 0} for kind in ("rollout", "trainer", "reward", "reference")},
        **KL,
    )
    # the prompts of step s are admitted when step s - 1 begins, so each death is noticed before the next one
    deaths = {1: ("rollout-0",), 3: ("reward-0", "reference-0"), 6: ("trainer",)}
    pids: dict[str, int] = {}

    class Watched(EventLog):
        def emit(self, event: Event) -> None:
            super().emit(event)
            if event.task == "worker_started":
                pids[event.actor] = event.info["pid"]

    class Deadly(RemoteLearner):
        async def train(self, step: int) -> None:
            for worker in deaths.pop(step, ()):
                os.kill(pids[worker], signal.SIGKILL)
            await super().train(step)

    monkeypatch.setattr("tailrace.run.log.EventLog", Watched)
    monkeypatch.setattr("tailrace.run.separated.RemoteLearner", Deadly)
    assert train(config, resume=False) == 0
    assert not deaths
    died = Counter(event.actor for event in of(run, "worker_died"))
    assert died == {"rollout-0": 1, "reward-0": 1, "reference-0": 1, "trainer": 1}
    last = {event.step: event for event in steps_of(run)}
    assert last.keys() == set(range(8))
    assert all(event.samples == 8 for event in last.values())
    assert all(event.metrics["staleness_max"] <= 1 for event in last.values())


def command(config: RunConfig, recipe: Path, *options: str) -> list[str]:
    recipe.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return [sys.executable, "-m", "tailrace", "train", str(recipe), *options]


def interrupted(start: list[str], number: signal.Signals) -> str:
    """Start a run, send it a signal after two steps, and return its stderr when it has ended by itself.

    The signal goes to the group, as from a terminal. SIGTERM also goes to the process itself, as from `timeout`.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(start, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        steps = (line for line in process.stdout if line.startswith("step "))
        next(steps)
        next(steps)
        if number == signal.SIGTERM:
            process.send_signal(number)
        os.killpg(process.pid, number)
        process.stdout.read()
        said = process.stderr.read()
        assert process.wait(timeout=60) == 130, said
    return said


def test_an_interrupted_run_saves_ends_its_processes_and_goes_on(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, connected_to_ray: None, request: pytest.FixtureRequest
) -> None:
    run = tmp_path / "run"

    def steps(count: int) -> RunConfig:
        never = {"checkpoint": {"every": 100}, "evaluation": {"every": 100}}
        model = tiny_model("llama")
        return small_run(run, model, prompts, pipeline=FULLY_ASYNCHRONOUS, trainer__steps=count, **never)

    start = command(steps(50), tmp_path / "recipe.yaml")  # more steps than it makes before it hears of the signal
    for number, options in ((signal.SIGINT, []), (signal.SIGTERM, ["--resume"])):
        said = interrupted([*start, *options], number).splitlines()
        warned = [line for line in said if "responses have special tokens that are left out" in line]
        assert all(line.startswith(("tailrace: warning: ", "rollout-0: warning: ")) for line in warned)
        waits = [line for line in said if " has not started yet, and is waited for" in line]
        *phases, last = [line for line in said if line not in {*warned, *waits}]
        assert last == "Stopping; once more to exit at once."
        assert [phase.partition(" ")[0] for phase in phases] == ["starting", "starting"]
        pids = [event.info["pid"] for event in of(run, "worker_started")]
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    end = len(steps_of(run)) + 2
    request.getfixturevalue("local")
    assert train(steps(end), resume=True) == 0
    assert [event.step for event in steps_of(run)] == list(range(end))
    saved = [event.info["path"] for event in of(run, "checkpoint")]
    assert [event.info["resumed_from"] for event in of(run, "run")] == [None, *saved[:2]]
