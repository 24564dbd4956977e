"""The shipped recipes keep what their comments promise."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tailrace.config.load import load_config

RECIPES = Path(__file__).parents[2] / "recipes"
RUNTIME: Any = {key: True for key in ("output_dir", "pipeline", "weights", "cluster", "queue")}
RUNTIME |= {"trainer": {"micro_batch_tokens"}}
"""The keys of how a run is carried out, rather than what it trains."""


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda recipe: str(recipe.stem))
def test_a_recipe_that_ships_resolves_to_one_that_loads_back_unchanged(recipe: Path) -> None:
    config = load_config(recipe)
    assert load_config(yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))) == config


def test_the_asynchronous_recipe_trains_what_grpo_trains() -> None:
    grpo, asynchronous = (load_config(RECIPES / name) for name in ("grpo.yaml", "smollm2_async.yaml"))
    assert asynchronous.model_dump(exclude=RUNTIME) == grpo.model_dump(exclude=RUNTIME)


def test_the_asynchronous_recipe_gives_each_pool_a_core_and_bounds_staleness_by_one() -> None:
    config = load_config(RECIPES / "smollm2_async.yaml")
    assert (config.pipeline.placement, config.pipeline.streaming, config.pipeline.max_staleness) == (
        "separated",
        True,
        1,
    )
    assert config.weights_mode == "in_flight"
    assert (config.cluster.rollout.cores, config.cluster.trainer.cores) == ((0,), (1,))
    assert config.queue.type == "service"
    group = 30 + config.algorithm.group_size * 10  # at least the tokens of a prompt and its responses
    assert config.trainer.micro_batch_tokens < config.groups_per_step * group


def test_a_dry_run_of_the_asynchronous_recipe_resolves_it_and_starts_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tailrace", "train", str(RECIPES / "smollm2_async.yaml")]
    command += [f"output_dir={tmp_path / 'run'}", "prompts.source.size=200", "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    resolved = load_config(yaml.safe_load(done.stdout))
    assert resolved.pipeline.placement == "separated"
    assert not (tmp_path / "run").exists()
