"""Whole runs that play a trace: every length is exact, in every mode."""

import random
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import polars as pl
import pytest

from tailrace.cluster.local import LocalCluster
from tailrace.errors import TraceError, UserError
from tailrace.events import read_events
from tailrace.report.trace_sink import trace_of_run
from tailrace.run.train import train
from tailrace.workloads.files import write_trace
from tailrace.workloads.trace import COLUMNS, Provenance, Trace
from tests.conftest import TinyModel
from tests.helpers.runs import small_run

MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "streaming": {"placement": "separated", "streaming": True},
    "fully asynchronous": {"placement": "separated", "max_staleness": 2, "streaming": True},
}
STEPS, GROUPS, GROUP_SIZE, LONGEST = 3, 2, 4, 40


def made_trace(seed: int = 0) -> Trace:
    """A trace of random lengths; the first sample of each group calls a tool."""
    chance = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for step in range(STEPS):
        for group in range(GROUPS):
            prompt = chance.randint(2, 30)
            for sample in range(GROUP_SIZE):
                row: dict[str, Any] = {"step": step, "group": group, "sample": sample, "prompt_tokens": prompt}
                row |= {"finish_reason": "length" if sample == 1 else "stop", "reward_s": 0.01}
                tokens = chance.randint(1, LONGEST // 4)
                turns, calls = None, None
                if not sample:
                    second = {"prompt_tokens": prompt + tokens + 6, "generated_tokens": 4}
                    turns = [{"prompt_tokens": prompt, "generated_tokens": tokens}, second]
                    calls = [{"turn": 0, "seconds": 0.05}]
                    tokens += 4
                rows.append(
                    row | {"response_tokens": tokens, "reward": chance.random(), "turns": turns, "tool_calls": calls}
                )
    schema = {name: column.dtype for name, column in COLUMNS.items()}
    return Trace.of(pl.DataFrame(rows, schema), Provenance(source="made", max_new_tokens=LONGEST))


def replaying(tmp_path: Path, model: Path, **changes: Any) -> Any:
    path = tmp_path / "made.parquet"
    write_trace(made_trace(), path)
    pipeline = changes.pop("pipeline", {})
    return small_run(
        tmp_path / "run",
        model,
        path,
        prompts__source={"type": "trace", "path": str(path)},
        prompts__shuffle=False,
        pipeline={**pipeline, "replay": str(path)},
        sampling__max_new_tokens=LONGEST,
        observe__breakdown=True,
        trainer__steps=STEPS,
        **{"prompts__held_out": 0, **changes},
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_run_of_any_mode_plays_the_lengths_and_rewards_of_a_trace(
    tmp_path: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr("tailrace.run.separated.make_cluster", lambda config, _: LocalCluster(config))
    assert train(replaying(tmp_path, tiny_model("llama"), pipeline=MODES[mode]), resume=False) == 0
    columns = ("step", "sample", "prompt_tokens", "response_tokens", "finish_reason", "reward")
    assert trace_of_run(tmp_path / "run").samples.select(columns).equals(made_trace().samples.select(columns))
    events = read_events(tmp_path / "run" / "events.jsonl")
    told = [event for event in events if event.task == "breakdown"]
    assert sum(event.metrics.get("tools", 0.0) for event in told) > 0, "others of a group end before its tool does"
    gradings = sorted((event.start, event.end) for event in events if event.task == "reward")
    assert all(end - start >= 0.01 for start, end in gradings)
    assert all(end <= start for (_, end), (start, _) in pairwise(gradings)), "the recipe has one grading process"


@pytest.mark.parametrize("held_out", [0, 1])
def test_a_replay_starts_graders_only_for_evaluations(
    tmp_path: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, held_out: int
) -> None:
    monkeypatch.setattr("tailrace.run.colocated.GraderPool", MagicMock(side_effect=UserError("a grader was started")))
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
