"""`make bench-algorithms`: every algorithm on a small model, synchronous and with stale responses.

    python benchmarks/bench_algorithms.py [--steps 60] [--seeds 3] [--processes 2]

The model is a random Llama of 0.1M parameters; it learns to answer with digits. Each algorithm is the section of its
recipe in `recipes/`. Its runs have `pipeline.max_staleness` 0, and 4 without and with the correction that is then the
default. Workers are tasks of one process: learning is measured here, not speed. Rewards are those of held-out prompts:
the groups that DAPO trains on are chosen by their rewards. A run's final reward is the mean of its last evaluations.
Curves are left in `build/bench-algorithms`, where plot_algorithms.py finds them. The last line is JSON.
"""

import json
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import small_model
import typer

BUILD = Path(__file__).parent.parent / "build" / "bench-algorithms"
CURVES = BUILD / "curves.json"
STALENESS = 4
EVERY = 3
"""Steps between evaluations."""
LAST = 3
"""The last evaluations of a run, whose mean is its final reward."""

RECIPES: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "dr_grpo": (),
    "rloo": (),
    "reinforce_plus_plus": (),
    "gspo": (),
    "cispo": (),
    "dapo": ("algorithm.overlong.penalty_tokens=4",),
    "max_rl": ("rewards.grader.path=algorithm_rewards.digit_first",),
    "ppo": ("algorithm.critic.lr=1e-2", "algorithm.critic.warmup_steps=0", "trainer.frozen_steps=2"),
}
"""The algorithms by their recipes, with what the small model needs besides."""

MODES = {
    "synchronous": ("pipeline.max_staleness=0",),
    "uncorrected": (f"pipeline.max_staleness={STALENESS}", "algorithm.rollout_correction.type=none"),
    "corrected": (f"pipeline.max_staleness={STALENESS}",),
}


class Job(NamedTuple):
    """One run."""

    recipe: str
    mode: str
    seed: int
    steps: int


def overrides(job: Job, base: Path) -> list[str]:
    """What makes a recipe a run of the small model."""
    return [
        f"output_dir={base / f'{job.recipe}-{job.mode}-{job.seed}'}",
        *small_model.overrides(base, job.seed, steps=job.steps, every=EVERY),
        "sampling.max_new_tokens=12",
        "engine.dtype=float32",
        "engine.kv_cache_gib=0.01",
        *MODES[job.mode],
        *RECIPES[job.recipe],
    ]


class Curve(NamedTuple):
    """What a run shows of its learning."""

    rewards: list[float]
    """Of the held-out prompts, every `EVERY` steps from the untrained model on."""
    staleness: float
    """The mean over all samples that were trained on, in versions."""

    @property
    def final(self) -> float:
        """The final reward."""
        return fmean(self.rewards[-LAST:])


def curve(job: Job, base: Path) -> Curve:
    """Train, and return the curve."""
    events = small_model.trained(job.recipe, overrides(job, base))
    rewards = {event.step: event.metrics["reward"] for event in events if event.task == "evaluation"}
    stale = fmean(event.metrics["staleness_mean"] for event in events if event.task == "step")
    return Curve([reward for _, reward in sorted(rewards.items())], stale)


def main(steps: int = 60, seeds: int = 3, processes: int = 2, only: str = ",".join(RECIPES)) -> None:
    """Train all, and print the mean final reward of each, over the seeds."""
    jobs = [Job(recipe, mode, seed, steps) for recipe in only.split(",") for mode in MODES for seed in range(seeds)]
    with tempfile.TemporaryDirectory() as directory, ProcessPoolExecutor(processes) as pool:
        small_model.prepare(Path(directory), seeds)
        runs = [(job, pool.submit(curve, job, Path(directory))) for job in jobs]
        curves: dict[str, dict[str, list[Curve]]] = {}
        for job, run in runs:
            made = run.result()
            curves.setdefault(job.recipe, {}).setdefault(job.mode, []).append(made)
            print(f"{job.recipe} {job.mode} {job.seed}: {made.final:.3f}, staleness {made.staleness:.2f}", flush=True)
    BUILD.mkdir(parents=True, exist_ok=True)
    CURVES.write_text(json.dumps({name: _rewards(modes) for name, modes in curves.items()}))
    rewards = {
        recipe: {mode: round(fmean(one.final for one in found), 3) for mode, found in modes.items()}
        for recipe, modes in curves.items()
    }
    print(json.dumps({"bench": "algorithms", "steps": steps, "seeds": seeds, "final_reward": rewards}))


def _rewards(modes: dict[str, list[Curve]]) -> dict[str, list[list[float]]]:
    return {mode: [one.rewards for one in found] for mode, found in modes.items()}


if __name__ == "__main__":
    typer.run(main)
