"""What all tests of benchmarks use."""

from pathlib import Path

import pytest
import yaml

from tests.conftest import TinyModel
from tests.helpers.runs import small_run, write_prompts


@pytest.fixture
def recipe(tmp_path: Path, tiny_model: TinyModel) -> Path:
    """A recipe of 4 steps of 2 groups of 4, with evaluations and rewards."""
    config = small_run(tmp_path / "run", tiny_model("llama"), write_prompts(tmp_path / "prompts.jsonl"))
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return path
