"""The trainer under test."""

from pathlib import Path

from tailrace.config.trainer import TrainerConfig
from tailrace.trainer.backends.single import SingleTrainer
from tailrace.trainer.scorer import Scorer


def make_trainer(model_dir: Path, *, temperature: float = 1.0, **config: object) -> SingleTrainer:
    settings = {"precision": "fp32", "lr": 1e-3, **config}
    return SingleTrainer(
        model_dir,
        TrainerConfig.model_validate(settings),
        temperature=temperature,
        total_updates=10,
        device="cpu",
    )


def make_scorer(model_dir: Path, *, temperature: float = 1.0, precision: str = "fp32") -> Scorer:
    config = TrainerConfig.model_validate({"precision": precision})
    return Scorer(model_dir, config, temperature=temperature, device="cpu")
