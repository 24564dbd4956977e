"""Every algorithm's recipe trains a small model, which learns to answer with digits."""

from pathlib import Path
from statistics import fmean

import pytest

from tailrace.config.load import load_config
from tailrace.run.train import train
from tests.conftest import TinyModel
from tests.helpers.runs import steps_of, write_prompts

RECIPES: dict[str, tuple[str, ...]] = {
    "quickstart": (),
    "dr_grpo": (),
    "rloo": (),
    "reinforce_plus_plus": (),
    "gspo": (),
    "cispo": (),
    "dapo": ("algorithm.overlong.penalty_tokens=4",),
    "max_rl": (),
    "ppo": ("algorithm.critic.lr=1e-2", "algorithm.critic.warmup_steps=0", "trainer.frozen_steps=2"),
}
"""The recipes, with what so small a model needs besides."""
STEPS, LAST = 14, 3


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains_a_small_model(recipe: str, tmp_path: Path, tiny_model: TinyModel) -> None:
    config = load_config(
        Path(recipe),
        [
            f"output_dir={tmp_path / 'run'}",
            f"model.path={tiny_model('llama')}",
            "prompts.source.type=jsonl",
            f"prompts.source.path={write_prompts(tmp_path / 'prompts.jsonl')}",
            "prompts.held_out=0",
            "rewards.grader.type=function",
            "rewards.grader.path=tests.helpers.graders.digit_fraction",
            "rewards.workers=1",
            "threads=1",
            "sampling.max_new_tokens=12",
            "engine.dtype=float32",
            "engine.kv_cache_gib=0.01",
            f"trainer.steps={STEPS}",
            "trainer.precision=fp32",
            "trainer.lr=1e-2",
            "trainer.schedule=constant",
            "trainer.warmup_steps=0",
            f"checkpoint.every={STEPS}",
            "observe.tensorboard=false",
            *RECIPES[recipe],
        ],
    )
    assert train(config, resume=False) == 0
    rewards = [event.metrics["reward"] for event in steps_of(tmp_path / "run")]
    assert len(rewards) == STEPS
    assert fmean(rewards[-LAST:]) >= 2 * fmean(rewards[:LAST])
