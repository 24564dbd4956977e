"""From the trainer's configuration to a trainer."""

from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.config.run import RunConfig
from tailrace.config.trainer import AdapterTrainerBackend, SingleTrainerBackend, TrainerConfig
from tailrace.trainer.backends.adapter import load_trainer_factory, open_adapter
from tailrace.trainer.base import Trainer

if TYPE_CHECKING:
    from tailrace.trainer.scorer import Scorer


def check_trainer(config: TrainerConfig) -> None:
    """Whether there is such a trainer, before anything is made.

    Raises:
        UserError: what the adapter's path names is not there, or cannot be called.
    """
    if isinstance(config.backend, AdapterTrainerBackend):
        load_trainer_factory(config.backend)


def make_trainer(
    model_dir: Path, config: TrainerConfig, *, temperature: float, total_updates: int, device: str
) -> Trainer:
    """A trainer of the Hugging Face directory `model_dir`; the arguments are those of `SingleTrainer`
    (tailrace/trainer/backends/single.py).

    Raises:
        UserError: the model cannot be trained, or an adapter is no trainer.
    """
    match config.backend:
        case SingleTrainerBackend():
            from tailrace.trainer.backends.single import SingleTrainer  # seconds: not where another process trains

            return SingleTrainer(
                model_dir,
                config,
                temperature=temperature,
                total_updates=total_updates,
                device=device,
            )
        case AdapterTrainerBackend():
            return open_adapter(
                config.backend,
                model_dir,
                config,
                temperature=temperature,
                total_updates=total_updates,
                device=device,
            )


def make_run_trainer(config: RunConfig, model_dir: Path) -> Trainer:
    """The trainer of a run; see `make_trainer`."""
    return make_trainer(
        model_dir,
        config.trainer,
        temperature=config.sampling.temperature,
        total_updates=config.trainer.steps * config.mini_batches_per_step,
        device=config.device,
    )


def make_run_scorer(config: RunConfig, model_dir: Path) -> "Scorer":
    """The frozen initial weights of a run, which say how likely they make a response.

    Raises:
        ModelError: see `Scorer`.
    """
    from tailrace.trainer.scorer import Scorer  # seconds: only where something is scored

    return Scorer(model_dir, config.trainer, temperature=config.sampling.temperature, device=config.device)
