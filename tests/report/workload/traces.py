"""Descriptions of made-up traces: conversations with everything that a trace may have, and plain responses."""

from typing import Any

import numpy as np
import polars as pl

from tailrace.workloads.characterization.description import Description
from tailrace.workloads.trace import COLUMNS, Provenance, Trace


def conversations(*, steps: int = 12, prompts: int = 8, samples: int = 4) -> Description:
    """Samples of one to three turns, with tools, rewards, a filter and versions, that grow longer step by step."""
    random = np.random.default_rng(0)
    rows = [
        _row(random, step, group, sample)
        for step in range(steps)
        for group in range(prompts)
        for sample in range(samples)
    ]
    schema = {name: COLUMNS[name].dtype for name in rows[0]}
    return Description.of(Trace.of(pl.DataFrame(rows, schema=schema), Provenance(source="made up", model="none")))


def _row(random: np.random.Generator, step: int, group: int, sample: int) -> dict[str, Any]:
    count = int(random.integers(1, 4))
    calls = [
        {"turn": turn, "name": "search", "seconds": float(random.exponential()), "returned_tokens": 170}
        for turn in range(count - 1)
    ]
    tokens = int(random.lognormal(4 + 0.2 * group + 0.1 * step, 0.3)) + count
    turns = [
        {
            "prompt_tokens": 50 + 200 * turn,
            "cached_tokens": 40 + 150 * turn,
            "generated_tokens": (tokens + turn) // count,
        }
        for turn in range(count)
    ]
    return {
        "step": step,
        "group": group,
        "sample": sample,
        "prompt_tokens": 50 + group,
        "response_tokens": tokens,
        "reward": float(random.integers(2)),
        "kept": group % 2 == 0,
        "first_version": max(0, step - 1),
        "turns": turns,
        "tool_calls": calls,
    }


def requests(count: int = 200) -> Description:
    """The requests of a service: one step, and one sample a group."""
    random = np.random.default_rng(1)
    frame = pl.DataFrame(
        {
            "step": [0] * count,
            "group": range(count),
            "sample": [0] * count,
            "prompt_tokens": random.integers(10, 5000, count),
            "response_tokens": random.integers(1, 500, count),
        }
    )
    return Description.of(Trace.of(frame, Provenance(source="a service", is_service=True)))
