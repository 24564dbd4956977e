"""Makes a trainer from its configuration."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.config.algorithm import CriticConfig
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


def make_critic(config: RunConfig, model_dir: Path, critic: CriticConfig) -> Trainer:
    """Make the critic of a run; `model_dir`: the policy's initial weights.

    Raises:
        ModelError: its model cannot be trained.
    """
    from tailrace.trainer.backends.critic import Critic  # slow: only where one is trained

    own = {"lr": critic.lr, "warmup_steps": critic.warmup_steps}
    args = TrainerArgs.of(config, model_dir if critic.path is None else Path(critic.path))
    return Critic(replace(args, config=args.config.model_copy(update=own), frozen_updates=0))


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
