"""Whole runs that play a trace: every length is exact, in every mode."""

from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from tailrace.errors import TraceError, UserError
from tailrace.events import read_events
from tailrace.report.trace_sink import trace_of_run
from tailrace.run.train import train
from tests.conftest import TinyModel
from tests.helpers.local_workers import use_local_workers
from tests.helpers.replays import PLAYED, made_trace, replaying

MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "streaming": {"placement": "separated", "streaming": True},
    "fully asynchronous": {"placement": "separated", "max_staleness": 2, "streaming": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_a_run_of_any_mode_plays_the_lengths_and_rewards_of_a_trace(
    tmp_path: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    use_local_workers(monkeypatch)
    assert train(replaying(tmp_path, tiny_model("llama"), pipeline=MODES[mode]), resume=False) == 0
    assert trace_of_run(tmp_path / "run").samples.select(PLAYED).equals(made_trace().samples.select(PLAYED))
    events = read_events(tmp_path / "run" / "events.jsonl")
    told = [event for event in events if event.task == "breakdown"]
    assert sum(event.metrics.get("tools", 0.0) for event in told) > 0, "others of a group end before its tool does"
    gradings = sorted((event.start, event.end) for event in events if event.task == "reward")
    assert gradings
    assert all(end - start >= 0.01 for start, end in gradings)
    assert all(end <= start for (_, end), (start, _) in pairwise(gradings)), "the recipe has one grading process"


@pytest.mark.parametrize("held_out", [0, 1])
def test_a_replay_starts_graders_only_for_evaluations(
    tmp_path: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, held_out: int
) -> None:
    monkeypatch.setattr("tailrace.run.colocated.Graders", MagicMock(side_effect=UserError("a grader was started")))
    rewards = {"grader": {"type": "exact"}}
    config = replaying(tmp_path, tiny_model("llama"), rewards=rewards, prompts__held_out=held_out)
    with pytest.raises(UserError, match="a grader was started") if held_out else nullcontext():
        train(config, resume=False)


def test_a_trace_that_is_too_short_for_the_run_is_found_before_anything_starts(
    tmp_path: Path, tiny_model: TinyModel
) -> None:
    config = replaying(tmp_path, tiny_model("llama"), algorithm={"type": "grpo", "group_size": 8})
    with pytest.raises(TraceError, match=r"pipeline.replay has 4 samples in its group 0, and .*group_size is 8"):
        train(config, resume=False)
    assert not (tmp_path / "run").exists()
