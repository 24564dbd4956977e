"""One side of a pair of `workload_replay.py`, a colocated run: a real one, or the replay of a trace, step by step.

    python benchmarks/replay_turns.py RECIPE TRACE [KEY=VALUE]...

TRACE is - for the real run. Each step waits for its turn (`gate`).
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from trl_ours import run

from tailrace.bench.setup import make_setup
from tailrace.config.load import load_config
from tailrace.config.run import RunConfig
from tailrace.workloads.files import write_trace


def configured(recipe: Path, trace: str, changes: Sequence[str]) -> RunConfig:
    """The configuration of the run. Its directory exists, with the trace that a replay plays."""
    if trace == "-":
        config = load_config(recipe, changes)
        Path(config.output_dir).mkdir(parents=True)
        return config
    setup = make_setup(trace, recipe, changes)
    played = setup.config.pipeline.replay
    assert played is not None
    Path(played).parent.mkdir(parents=True)
    write_trace(setup.trace, Path(played))
    return setup.config


if __name__ == "__main__":
    CONFIG = configured(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
    asyncio.run(run(CONFIG, Path(CONFIG.output_dir)))
