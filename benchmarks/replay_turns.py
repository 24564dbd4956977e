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
    setup = None if trace == "-" else make_setup(trace, recipe, changes)
    config = load_config(recipe, changes) if setup is None else setup.config
    directory = Path(config.output_dir)
    directory.mkdir(parents=True)
    if setup is None:
        return config
    played = directory / "played.parquet"
    write_trace(setup.trace, played)
    return setup.reading(played)


if __name__ == "__main__":
    CONFIG = configured(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
    asyncio.run(run(CONFIG, Path(CONFIG.output_dir)))
