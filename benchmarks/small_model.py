"""Runs of a random Llama of 0.1M parameters, which learns to answer with digits within a few steps."""

import contextlib
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

if TYPE_CHECKING:
    from tailrace.events import Event

SEPARATED = ("pipeline.placement=separated", "queue.type=service", "queue.units=1")


def prepare(base: Path, seeds: int) -> None:
    """Write the prompts, and a model for each seed. Processes that start after this find the rewards' functions."""
    from tailrace.conformance.tiny import write_tiny_model

    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    os.environ["OMP_NUM_THREADS"] = "1"
    base.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"prompt": f"n{number}", "answer": ""}) + "\n" for number in range(64))
    (base / "prompts.jsonl").write_text("".join(lines))
    for seed in range(seeds):
        write_tiny_model("llama", base / f"model-{seed}", seed=seed)


def overrides(base: Path, seed: int, *, steps: int, every: int) -> list[str]:
    """What makes a recipe a run of the model of this seed, with an evaluation after `every` steps."""
    return [
        f"model.path={base / f'model-{seed}'}",
        f"seed={seed}",
        "prompts.source.type=jsonl",
        f"prompts.source.path={base / 'prompts.jsonl'}",
        "prompts.held_out=32",
        f"evaluation.every={every}",
        "evaluation.greedy=false",
        "evaluation.samples=1",
        "rewards.grader.type=function",
        "rewards.grader.path=algorithm_rewards.digits",
        "rewards.workers=1",
        f"trainer.steps={steps}",
        "trainer.precision=fp32",
        "trainer.lr=5e-3",
        "trainer.schedule=constant",
        "trainer.warmup_steps=0",
        f"checkpoint.every={steps}",
        "observe.tensorboard=false",
    ]


def trained(recipe: str, changes: Sequence[str]) -> "list[Event]":
    """Train with workers that are tasks of this process, and return the events.

    Raises:
        RuntimeError: the run failed.
    """
    import torch

    from tailrace.cluster.local import LocalCluster
    from tailrace.config.load import load_config
    from tailrace.events import read_events
    from tailrace.registers import run_files
    from tailrace.run.train import train

    torch.set_num_threads(1)
    config = load_config(Path(recipe), [*changes, *SEPARATED])
    with (
        patch("tailrace.run.separated.make_cluster", lambda settings, _: LocalCluster(settings)),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        if code := train(config, resume=False):
            raise RuntimeError(f"{config.output_dir} ended with {code}")
    return read_events(Path(config.output_dir) / run_files.EVENTS)
