"""Runs that play a small trace."""

import random
from pathlib import Path
from typing import Any

import polars as pl

from tailrace.config.run import RunConfig
from tailrace.workloads.files import write_trace
from tailrace.workloads.trace import COLUMNS, Provenance, Trace
from tests.helpers.runs import small_run

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


def replaying(tmp_path: Path, model: Path, **changes: Any) -> RunConfig:
    """The configuration of a run that plays `made_trace`; see `small_run`."""
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


PLAYED = ("step", "sample", "prompt_tokens", "response_tokens", "finish_reason", "reward")
"""The columns of a trace that a run plays as they are."""
