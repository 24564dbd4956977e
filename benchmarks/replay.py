"""Workload replay: responses are as long as those of recorded training steps, whatever the model says.

`make_engine` makes the native engine for `engine: {type: adapter, path: replay.make_engine}`. It generates each
response of a run to the length in a file, past end-of-sequence tokens. The file is a JSON list of groups, each a list
of the lengths of its samples. The run's group k takes the group at k modulo their number.
"""

import json
import math
import os
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tailrace.config.engine import NativeEngineConfig
from tailrace.engine.backends.native import NativeEngine
from tailrace.engine.base import EngineArgs, SampleStream
from tailrace.prompts.order import sample_seed
from tailrace.types import Request

WORKLOAD = Path("polytrace", "dapo_math_32b")
MEDIAN, PERCENTILE_99 = 465, 2711
"""Median and 99th percentile of the recorded lengths."""

Lengths = list[list[int]]
"""Lengths of the responses of each group."""


def recorded(steps: int, groups: int, group_size: int) -> tuple[list[Lengths], str]:
    """Return the recorded lengths of the groups of each step, and their source.

    They are those of DAPO training steps (PolyTrace's workloads, in the folder $TAILRACE_DATA). Where these are
    missing, they are log-normal with the same median and 99th percentile.
    """
    rng = random.Random(0)
    files = sorted(Path(os.environ.get("TAILRACE_DATA", ""), WORKLOAD).glob("packed_lengths_step_*.jsonl"))
    if files:
        recordings = [_outputs(file, group_size) for file in files]
        chosen = [rng.sample(recordings[step % len(files)], groups) for step in range(steps)]
        return chosen, "DAPO, Qwen2.5-32B (PolyTrace)"
    sigma = math.log(PERCENTILE_99 / MEDIAN) / statistics.NormalDist().inv_cdf(0.99)

    def length() -> int:
        return round(MEDIAN * math.exp(rng.gauss(0, sigma)))

    drawn = [[[length() for _ in range(group_size)] for _ in range(groups)] for _ in range(steps)]
    return drawn, f"log-normal, median {MEDIAN}, 99th percentile {PERCENTILE_99:,} before scaling"


def _outputs(file: Path, group_size: int) -> list[list[int]]:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [row["output"][:group_size] for row in rows if not row["validate"] and len(row["output"]) >= group_size]


def scaled(lengths: Sequence[Sequence[int]], *, tokens: int, longest: int) -> Lengths:
    """Scale the lengths of a step by one factor, so that they are `tokens` in all, and cut them off at `longest`.

    The sum is off by the rounding of each length.

    Raises:
        ValueError: so many tokens need longer responses.
    """
    if tokens > longest * sum(map(len, lengths)):
        raise ValueError(f"{tokens} tokens do not fit into {sum(map(len, lengths))} responses of {longest} at most")

    def by(factor: float) -> Lengths:
        return [[min(longest, max(1, round(length * factor))) for length in group] for group in lengths]

    low, high = 0.0, float(longest)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(map(sum, by(middle))) > tokens else (middle, high)
    return by(low)


class ReplayEngine(NativeEngine):
    """The native engine, with the lengths of responses given beforehand."""

    def __init__(self, config: NativeEngineConfig, args: EngineArgs, lengths: Lengths, seed: int) -> None:
        """`seed`: the seed of the run."""
        self._lengths = lengths
        self._seed = seed
        super().__init__(config, args)

    def submit(self, requests: Sequence[Request]) -> SampleStream:
        """See `Engine`."""
        return super().submit([self._forced(request) for request in requests])

    def _forced(self, request: Request) -> Request:
        lengths = self._lengths[request.group_id % len(self._lengths)]
        (length,) = (
            length
            for sample, length in enumerate(lengths)
            if sample_seed(self._seed, request.group_id, sample) == request.seed
        )
        update = {"max_new_tokens": length, "ignore_eos": True}
        return replace(request, sampling=request.sampling.model_copy(update=update))


def make_engine(args: EngineArgs, *, lengths: str, seed: int = 0, **native: Any) -> ReplayEngine:
    """Make the engine. `lengths`: the file; `seed`: the seed of the run; `native`: options as for the native engine."""
    config = NativeEngineConfig.model_validate(native)
    groups: Lengths = json.loads(Path(lengths).read_text())
    return ReplayEngine(config, args, groups, seed)
