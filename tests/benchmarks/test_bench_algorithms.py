"""Every algorithm's recipe trains a small model, as the benchmark does, which learns to answer with digits."""

from pathlib import Path
from statistics import fmean

import pytest
from bench_algorithms import RECIPES, Job, overrides

from tailrace.config.load import load_config
from tailrace.run.train import train
from tests.conftest import TinyModel
from tests.helpers.runs import steps_of, write_prompts

STEPS, LAST = 14, 3


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains_a_small_model(recipe: str, tmp_path: Path, tiny_model: TinyModel) -> None:
    job = Job(recipe, "synchronous", seed=0, steps=STEPS)
    here = [
        f"output_dir={tmp_path / 'run'}",
        f"model.path={tiny_model('llama')}",
        f"prompts.source.path={write_prompts(tmp_path / 'prompts.jsonl')}",
        "prompts.held_out=0",
        "rewards.grader.path=tests.helpers.graders.digit_fraction",
        "trainer.lr=1e-2",
        "threads=1",
    ]
    assert train(load_config(Path(job.recipe), [*overrides(job, tmp_path), *here]), resume=False) == 0
    rewards = [event.metrics["reward"] for event in steps_of(tmp_path / "run")]
    assert len(rewards) == STEPS
    assert fmean(rewards[-LAST:]) >= 2 * fmean(rewards[:LAST])
