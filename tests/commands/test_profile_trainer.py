"""A profile of a real trainer: complete, and never left half written."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from tailrace.commands.profile_trainer import measure_trainer, profile_trainer
from tailrace.config.load import load_config
from tailrace.config.run import RunConfig
from tailrace.errors import UserError
from tailrace.planning.packing import Lengths, plan_micro_batches
from tailrace.planning.step_times.trainer_profile import ProfiledTrainer, TrainerProfile
from tailrace.trainer.backends.single import SingleTrainer
from tailrace.trainer.base import UpdateResult
from tests.conftest import TinyModel
from tests.helpers.bench import write_recipe


def recipe(tmp_path: Path, tiny_model: TinyModel, *further: str) -> RunConfig:
    changes = ["trainer.micro_batch_tokens=64", "trainer.precision=fp32", "threads=1"]
    return load_config(write_recipe(tmp_path, tiny_model), [*changes, *further])


def test_a_profile_foretells_micro_batches_of_other_shapes(tmp_path: Path, tiny_model: TinyModel) -> None:
    config = recipe(tmp_path, tiny_model)
    path = tmp_path / "trainer.json"
    profile_trainer(config, path, rounds=1)
    profile = msgspec.json.decode(path.read_bytes(), type=TrainerProfile)
    assert (profile.threads, profile.precision, len(profile.update)) == (1, "fp32", len(profile.score))
    assert max(point.tokens for point in profile.update) <= 64
    (parts,) = plan_micro_batches([Lengths(0, 10, 20), Lengths(0, 10, 5)], 64)
    times = ProfiledTrainer(profile)
    assert 0 < times.score_s(parts) < times.update_s(parts)
    assert times.optimizer_s() == profile.optimizer_s > 0


@pytest.mark.parametrize(
    "algorithm",
    [
        {"type": "dr_grpo"},
        {"type": "dapo", "overlong": {"filter": True}},
        {"type": "grpo", "rollout_rejection": {"type": "kl"}},
        {"type": "ppo"},
    ],
    ids=lambda keys: keys["type"],
)
def test_the_optimizer_step_of_each_algorithm_is_a_whole_one(
    algorithm: dict[str, Any], tmp_path: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = SingleTrainer.apply
    results: list[UpdateResult] = []

    def apply(trainer: SingleTrainer) -> UpdateResult:
        results.append(whole(trainer))
        return results[-1]

    monkeypatch.setattr(SingleTrainer, "apply", apply)
    measure_trainer(
        recipe(tmp_path, tiny_model, f"algorithm={yaml.safe_dump(algorithm, default_flow_style=True)}"), rounds=2
    )
    assert [result.applied for result in results] == [True] * 3


def test_an_existing_profile_is_kept(tmp_path: Path, tiny_model: TinyModel) -> None:
    (path := tmp_path / "trainer.json").write_text("mine")
    with pytest.raises(UserError, match=r"trainer\.json exists"):
        profile_trainer(recipe(tmp_path, tiny_model), path, rounds=1)
    assert path.read_text() == "mine"
