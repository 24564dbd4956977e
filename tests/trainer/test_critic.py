"""A critic is the model with a value for each token in place of its logits."""

from pathlib import Path

import numpy as np
import pytest

from tailrace.algorithms.factory import make_algorithm
from tailrace.algorithms.ppo import Ppo
from tailrace.config.algorithm import CriticConfig, PpoConfig
from tailrace.config.run import RunConfig
from tailrace.conformance.samples import make_samples
from tailrace.trainer.base import Trainer, TrainSample
from tailrace.trainer.factory import make_critic
from tests.conftest import TinyModel
from tests.helpers.runs import small_run


def config(tmp_path: Path, model: Path) -> RunConfig:
    return small_run(tmp_path / "run", model, tmp_path / "prompts.jsonl", algorithm={"type": "ppo", "group_size": 1})


def samples(critic: Trainer) -> list[TrainSample]:
    made = make_samples()
    values = critic.log_probs(made)
    return [
        TrainSample(
            group_id=sample.group_id,
            prompt_ids=sample.prompt_ids,
            response_ids=sample.response_ids,
            response_mask=sample.response_mask,
            columns={"values": value, "returns": np.ones(len(value), np.float32)},
        )
        for sample, value in zip(made, values, strict=True)
    ]


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # tied, and with a head of its own
def test_a_critic_has_a_value_head_alone_and_comes_back_from_a_checkpoint(
    tmp_path: Path, tiny_model: TinyModel, family: str
) -> None:
    recipe = config(tmp_path, tiny_model(family))
    critic = make_critic(recipe, tiny_model(family), CriticConfig(lr=1e-2))
    names = {name for name, _ in critic.weights()}
    assert "value_head.weight" in names
    assert "lm_head.weight" not in names
    before = samples(critic)
    assert all(not sample.columns["values"].any() for sample in before), "the head begins at 0"
    algorithm = make_algorithm(PpoConfig())
    assert isinstance(algorithm, Ppo)
    for _ in range(8):
        critic.accumulate(samples(critic), algorithm.value_loss)
        critic.apply()
    learned = critic.log_probs(before)
    assert np.concatenate(learned).mean() > 0.1, "values go to the returns"
    (tmp_path / "saved").mkdir()
    critic.save(tmp_path / "saved")
    again = make_critic(recipe, tiny_model(family), CriticConfig(lr=1e-2))
    again.load(tmp_path / "saved")
    for one, other in zip(again.log_probs(before), learned, strict=True):
        np.testing.assert_array_equal(one, other)
