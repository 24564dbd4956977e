"""Makes a trainer from its configuration."""

from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.config.run import RunConfig
from tailrace.config.trainer import AdapterTrainerBackend, SingleTrainerBackend, TrainerConfig
from tailrace.trainer.backends.adapter import load_trainer_factory, open_adapter
from tailrace.trainer.base import Trainer, TrainerArgs

if TYPE_CHECKING:
    from tailrace.trainer.scorer import Scorer


def check_trainer(config: TrainerConfig) -> None:
    """Check that there is such a trainer, before anything is made.

    Raises:
        UserError: an adapter's path names nothing, or something that cannot be called.
    """
    if isinstance(config.backend, AdapterTrainerBackend):
        load_trainer_factory(config.backend)


def make_trainer(args: TrainerArgs) -> Trainer:
    """Make the trainer of the kind `args.config.backend`.

    Raises:
        UserError: the model cannot be trained, or an adapter is no trainer.
    """
    match args.config.backend:
        case SingleTrainerBackend():
            from tailrace.trainer.backends.single import SingleTrainer  # slow: not where another process trains

            return SingleTrainer(args)
        case AdapterTrainerBackend() as backend:
            return open_adapter(backend, args)


def make_run_trainer(config: RunConfig, model_dir: Path) -> Trainer:
    """Make the trainer of a run; see `make_trainer`."""
    return make_trainer(TrainerArgs.of(config, model_dir))


def make_run_scorer(config: RunConfig, model_dir: Path) -> "Scorer":
    """Make the scorer with the frozen initial weights of a run.

    Raises:
        ModelError: see `Scorer`.
    """
    from tailrace.trainer.scorer import Scorer  # slow: only where something is scored

    return Scorer(TrainerArgs.of(config, model_dir))
