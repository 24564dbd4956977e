"""The trainer and the scorer under test."""

from pathlib import Path

from tailrace.config.trainer import TrainerConfig
from tailrace.trainer.backends.single import SingleTrainer
from tailrace.trainer.base import TrainerArgs
from tailrace.trainer.scorer import Scorer


def make_trainer(model_dir: Path, *, temperature: float = 1.0, **config: object) -> SingleTrainer:
    """Make a trainer for ten updates, in fp32 unless `config` says otherwise."""
    return SingleTrainer(_args(model_dir, temperature, config))


def make_scorer(model_dir: Path, *, temperature: float = 1.0, **config: object) -> Scorer:
    """Make a scorer, in fp32 unless `config` says otherwise."""
    return Scorer(_args(model_dir, temperature, config))


def _args(model_dir: Path, temperature: float, config: dict[str, object]) -> TrainerArgs:
    settings = TrainerConfig.model_validate({"precision": "fp32", "lr": 1e-3, **config})
    return TrainerArgs(model_dir=model_dir, config=settings, temperature=temperature, total_updates=10, device="cpu")
