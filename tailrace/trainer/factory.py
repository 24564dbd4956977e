"""From the trainer's configuration to a trainer."""

from pathlib import Path

from tailrace.config.trainer import TrainerConfig
from tailrace.trainer.backends.single import SingleTrainer
from tailrace.trainer.base import Trainer


def make_trainer(
    model_dir: Path, config: TrainerConfig, *, temperature: float, total_updates: int, device: str, reference: bool
) -> Trainer:
    """A trainer of the Hugging Face directory `model_dir`; the arguments are those of `SingleTrainer`."""
    return SingleTrainer(
        model_dir, config, temperature=temperature, total_updates=total_updates, device=device, reference=reference
    )
