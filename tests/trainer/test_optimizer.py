import math

import pytest
import torch

from tailrace.config.trainer import TrainerConfig
from tailrace.trainer.optimizer import learning_rate, make_optimizer


def rates(total: int, **config: object) -> list[float]:
    settings = TrainerConfig.model_validate({"lr": 2.0, **config})
    return [learning_rate(settings, update, total) for update in range(total)]


def test_constant_holds_the_peak() -> None:
    assert rates(3) == [2.0, 2.0, 2.0]


def test_warm_up_rises_linearly_to_the_peak() -> None:
    assert rates(6, warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_linear_falls_from_the_peak_and_is_never_zero() -> None:
    assert rates(5, schedule="linear", warmup_steps=1) == [2.0, 2.0, 1.5, 1.0, 0.5]


def test_cosine_falls_from_the_peak_along_a_half_wave() -> None:
    assert rates(4, schedule="cosine") == pytest.approx([1 + math.cos(math.pi * k / 4) for k in range(4)])


def test_a_warm_up_longer_than_the_run_never_reaches_the_peak() -> None:
    assert rates(3, schedule="cosine", warmup_steps=5) == pytest.approx([0.4, 0.8, 1.2])


def test_updates_after_the_planned_last_one_keep_the_rate_at_zero() -> None:
    assert learning_rate(TrainerConfig(schedule="linear"), 12, 10) == 0.0


def test_only_matrices_decay() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    optimizer = make_optimizer(model, TrainerConfig(weight_decay=0.1))
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decays[id(p)] for name, p in model.named_parameters()} == {
        "0.weight": 0.1,
        "0.bias": 0.0,
        "1.weight": 0.0,
        "1.bias": 0.0,
    }
