"""`make bench-modes`: what the modes of a run learn in equal time, and from equally many samples.

    python benchmarks/bench_modes.py [--steps 24] [--seeds 3] [--processes 2] [--model tiny] [--only two] [--again]

The model of small_model.py learns to answer with digits, by GRPO. With `--model smollm2`, SmolLM2 learns the problems
of the quickstart, in one process. Engines and trainer take a set time for what they compute (paced.py), so a machine
with few cores has as many of them as are wanted. With two engines a step takes about as long to generate as to train
on. Of three engines one takes twice the time for each step.

    tiny, smollm2       the models
    two, three          the fleets
    sequential          synchronous, which waits for each batch
    s1_delayed, …       asynchronous: the staleness that is allowed, and how new weights get into engines

The rewards are those of held-out prompts. The seconds are counted from the start of the first step. Curves are left in
`build/bench-modes`, where plot_learning.py finds them. A run whose curve is there, of the same settings, is not made
again without `--again`.
The last line is JSON, with means over the seeds, by fleet and mode:

    reward          after the last step: the mode learns from as many samples as all others
    rewards         the same of each seed
    reward_then     when the quickest mode of the fleet and seed has made its last step
    seconds         of the whole run, beside `sequential`
    tokens          of a response in the last steps
    staleness       mean of all samples that were trained on, in versions
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import numpy as np
import small_model
import typer

BUILD = Path(__file__).parents[1] / "build" / "bench-modes"
EVERY = 2
"""Steps between evaluations."""
LAST = 3
"""Evaluations at the end of a run, whose mean is its final reward."""
GROUPS, GROUP_SIZE, SLOTS = 8, 8, 16


class Pace(NamedTuple):
    """How long a model's engines and trainer take."""

    step_s: float
    """Seconds of an engine's step."""
    token_s: float
    """Seconds in which the trainer takes in a token of a response."""
    kv_cache_gib: float


PACES = {"tiny": Pace(0.02, 0.8e-3, 0.01), "smollm2": Pace(0.25, 10e-3, 0.25)}
"""A synchronous step of two engines has about 50 steps of the tiny model, and 12 of SmolLM2."""
CURVES = {model: BUILD / f"{model}.json" for model in PACES}

FLEETS: dict[str, tuple[float, ...]] = {"two": (1.0, 1.0), "three": (1.0, 1.0, 2.0)}
"""How long each engine takes for a step, in `Pace.step_s`."""


def _stale(staleness: int, weights: str) -> tuple[str, ...]:
    return (f"pipeline.max_staleness={staleness}", "pipeline.streaming=true", f"weights.mode={weights}")


MODES: dict[str, tuple[str, ...]] = {
    "sequential": ("pipeline.max_staleness=0",),
    "s1_delayed": _stale(1, "delayed"),
    "s1_sub_step": _stale(1, "sub_step"),
    "s1_in_flight": _stale(1, "in_flight"),
    "s2_in_flight": _stale(2, "in_flight"),
    "s4_in_flight": _stale(4, "in_flight"),
    "s4_delayed": _stale(4, "delayed"),
}


class Job(NamedTuple):
    """One run."""

    model: str
    fleet: str
    mode: str
    seed: int
    steps: int


class Curve(msgspec.Struct, frozen=True):
    """What a run shows of its learning, at each evaluation: the first is before the first step."""

    rewards: list[float]
    seconds: list[float]
    """Since the start of the first step."""
    tokens: list[float]
    """Of a response of the step before each of the others."""
    staleness: float
    """The mean over all samples, in versions."""

    @property
    def final(self) -> float:
        """The reward at the end."""
        return fmean(self.rewards[-LAST:])

    def reward_at(self, seconds: float) -> float:
        """The mean of the last evaluations until then."""
        return fmean(self.rewards[: int(np.searchsorted(self.seconds, seconds, side="right"))][-LAST:] or [0.0])


def rollout_pools(fleet: str, pace: Pace) -> dict[str, Any]:
    """The sections `engine` and `cluster`: engines of one pace make a pool."""
    options = {"dtype": "float32", "kv_cache_gib": pace.kv_cache_gib, "max_batch_size": SLOTS}
    quick, *others = sorted(set(FLEETS[fleet]))

    def engine(times: float) -> dict[str, Any]:
        return {"type": "adapter", "path": "paced.make_engine", "options": {**options, "step_s": pace.step_s * times}}

    pools = {f"pace{times:g}": {"workers": FLEETS[fleet].count(times), "engine": engine(times)} for times in others}
    return {
        "engine": engine(quick),
        "cluster": {"rollout": {"workers": FLEETS[fleet].count(quick), "pools": pools}},
    }


def recipe(job: Job, base: Path) -> tuple[str, list[str]]:
    """The recipe of a run's model, and what changes of it."""
    if job.model == "tiny":
        return "grpo", [
            *small_model.overrides(base, job.seed, steps=job.steps, every=EVERY),
            "sampling.max_new_tokens=24",
        ]
    return "quickstart", [
        f"seed={job.seed}",
        "algorithm.dynamic_sampling=null",  # so that all modes train on the same prompts
        "prompts.held_out=64",
        f"evaluation.every={EVERY}",
        "rewards.workers=1",
        f"trainer.steps={job.steps}",
        "trainer.precision=fp32",
        "trainer.lr=1e-5",  # with the quickstart's, batches of half the size lose again what they learn
        "trainer.schedule=constant",
        f"checkpoint.every={job.steps}",
        "observe.tensorboard=false",
    ]


def run_directory(job: Job, base: Path) -> Path:
    """The directory of a run, until its curve is kept."""
    return base / "-".join(map(str, job))


def overrides(job: Job, base: Path) -> list[str]:
    """What makes a recipe a run of so many engines in a mode."""
    pace = PACES[job.model]
    backend = {"type": "adapter", "path": "paced.make_trainer", "options": {"token_s": pace.token_s}}
    return [
        f"output_dir={run_directory(job, base)}",
        f"algorithm.group_size={GROUP_SIZE}",
        f"trainer.train_batch_size={GROUPS * GROUP_SIZE}",
        "trainer.micro_batch_tokens=400",
        f"trainer.backend={json.dumps(backend)}",
        *(f"{name}={json.dumps(section)}" for name, section in rollout_pools(job.fleet, pace).items()),
        *MODES[job.mode],
    ]


def curve(job: Job, base: Path) -> Curve:
    """Train, and return the curve."""
    from tailrace.registers.events import EventKind

    name, changes = recipe(job, base)
    events = small_model.trained(name, [*changes, *overrides(job, base)])
    # By the number of steps that have been trained then, which is the step of an evaluation.
    steps = {(event.step or 0) + 1: event for event in events if event.task == EventKind.STEP}
    told = [event for event in events if event.task == EventKind.EVALUATION and event.step in {0, *steps}]
    evaluations = {event.step or 0: event.metrics["reward"] for event in told}
    start = min(event.start for event in steps.values())
    seen = sorted(evaluations)
    return Curve(
        rewards=[evaluations[step] for step in seen],
        seconds=[steps[step].end - start if step else 0.0 for step in seen],
        tokens=[steps[step].metrics["response_tokens_mean"] for step in seen if step],
        staleness=fmean(event.metrics["staleness_mean"] for event in steps.values()),
    )


def figures(of_fleet: Mapping[str, Sequence[Curve]]) -> dict[str, dict[str, float | list[float]]]:
    """The means over the seeds, by mode."""
    soonest = [min(one.seconds[-1] for one in of_seed) for of_seed in zip(*of_fleet.values(), strict=True)]
    waiting = of_fleet["sequential"]
    return {
        mode: {
            "reward": round(fmean(one.final for one in of), 3),
            "rewards": [round(one.final, 3) for one in of],
            "reward_then": round(fmean(one.reward_at(then) for one, then in zip(of, soonest, strict=True)), 3),
            "seconds": round(fmean(a.seconds[-1] / b.seconds[-1] for a, b in zip(of, waiting, strict=True)), 3),
            "tokens": round(fmean(tokens for one in of for tokens in one.tokens[-LAST:]), 1),
            "staleness": round(fmean(one.staleness for one in of), 2),
        }
        for mode, of in of_fleet.items()
    }


def kept(job: Job) -> Path:
    """The file with the curve of a run that is done, for the settings of today."""
    settings = [recipe(job, Path()), overrides(job, Path())]
    digest = hashlib.sha256(repr(settings).encode()).hexdigest()[:8]
    return BUILD / "runs" / f"{'-'.join(map(str, job))}-{digest}.json"


def keep(job: Job, base: Path) -> None:
    """Train, and keep the curve alone: all checkpoints together would take tens of GiB."""
    made = curve(job, base)
    kept(job).write_bytes(msgspec.json.encode(made))
    shutil.rmtree(run_directory(job, base))


def main(
    steps: int = 24,
    seeds: int = 3,
    processes: int = 2,
    model: str = "tiny",
    only: str = ",".join(FLEETS),
    *,
    again: bool = False,
) -> None:
    """Train all that is not there from before, or `again`, and print the figures."""
    jobs = [
        Job(model, fleet, mode, seed, steps) for fleet in only.split(",") for seed in range(seeds) for mode in MODES
    ]
    (BUILD / "runs").mkdir(parents=True, exist_ok=True)
    missing = [job for job in jobs if again or not kept(job).exists()]
    print(f"{len(missing)} of {len(jobs)} runs are to be made", flush=True)
    with tempfile.TemporaryDirectory() as directory, ProcessPoolExecutor(processes) as pool:
        small_model.prepare(Path(directory), seeds)
        for job, run in [(job, pool.submit(keep, job, Path(directory))) for job in missing]:
            run.result()
            made = msgspec.json.decode(kept(job).read_bytes(), type=Curve)
            print(f"{job.fleet} {job.mode} {job.seed}: {made.final:.3f} in {made.seconds[-1]:.1f} s", flush=True)
    curves: dict[str, dict[str, list[Curve]]] = {}
    for job in jobs:
        made = msgspec.json.decode(kept(job).read_bytes(), type=Curve)
        curves.setdefault(job.fleet, {}).setdefault(job.mode, []).append(made)
    CURVES[model].write_bytes(msgspec.json.encode(curves))
    found = {fleet: figures(of_fleet) for fleet, of_fleet in curves.items()}
    print(json.dumps({"bench": "modes", "steps": steps, "seeds": seeds, model: found}))


if __name__ == "__main__":
    typer.run(main)
