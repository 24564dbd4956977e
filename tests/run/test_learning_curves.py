"""The effect of staleness on learning: all modes reach the same reward."""

import contextlib
import io
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tailrace.conformance.tiny import write_tiny_model
from tailrace.run.train import train
from tests.helpers.effort import effort
from tests.helpers.local_workers import use_local_workers
from tests.helpers.runs import small_run, steps_of, write_prompts

MODES: dict[str, dict[str, Any]] = {
    "synchronous": {"max_staleness": 0},
    "one_step": {"placement": "separated", "max_staleness": 1},
    "fully_asynchronous": {"placement": "separated", "max_staleness": 1, "streaming": True},
}
SEEDS = range(effort(2, 1))
STEPS, LAST = 18, 5
"""The steps of a run, and the number of last steps whose mean is its final reward."""
NOISE = 0.05
"""The tolerance, relative to the synchronous final reward of about 0.99: seeds differ by as much."""


def curve(directory: Path, model: Path, prompts: Path, mode: str, seed: int) -> list[float]:
    """The mean reward of each step of one run."""
    config = small_run(
        directory,
        model,
        prompts,
        seed=seed,
        pipeline=MODES[mode],
        weights={"mode": "delayed"} if mode == "one_step" else {},
        prompts__held_out=0,
        algorithm={"type": "grpo", "group_size": 8},
        trainer={"steps": STEPS, "train_batch_size": 32, "precision": "fp32", "lr": 1e-2},
        engine={"type": "native", "dtype": "float32", "kv_cache_gib": 0.01},
        checkpoint={"every": STEPS},
    )
    with contextlib.redirect_stdout(io.StringIO()):
        assert train(config, resume=False) == 0
    return [event.metrics["reward"] for event in steps_of(directory)]


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[float]]]:
    """The curves of each mode, by seed. The seed is that of the run and of the model's initial weights."""
    base = tmp_path_factory.mktemp("curves")
    prompts = write_prompts(base / "prompts.jsonl")
    models = [write_tiny_model("llama", base / f"model-{seed}", seed=seed) for seed in SEEDS]
    with pytest.MonkeyPatch.context() as patch:
        use_local_workers(patch)
        return {
            mode: [curve(base / f"{mode}-{seed}", models[seed], prompts, mode, seed) for seed in SEEDS]
            for mode in MODES
        }


@pytest.mark.parametrize("mode", MODES)
def test_every_seed_learns(curves: dict[str, list[list[float]]], mode: str) -> None:
    for rewards in curves[mode]:
        assert fmean(rewards[-LAST:]) >= 3 * fmean(rewards[:LAST])


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "synchronous"])
def test_the_final_reward_is_the_synchronous_one_within_noise(curves: dict[str, list[list[float]]], mode: str) -> None:
    ours, synchronous = ([fmean(rewards[-LAST:]) for rewards in curves[name]] for name in (mode, "synchronous"))
    assert fmean(ours) == pytest.approx(fmean(synchronous), rel=NOISE)
    assert [rewards[1:] for rewards in curves[mode]] != [rewards[1:] for rewards in curves["synchronous"]]
