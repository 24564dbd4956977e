"""A user's own trainer whose log-probabilities are at another temperature than sampling."""

from dataclasses import replace

from tailrace.trainer.backends.single import SingleTrainer
from tailrace.trainer.base import TrainerArgs


def make(args: TrainerArgs, *, factor: float) -> SingleTrainer:
    """Make the trainer. `factor`: the ratio of its temperature to that of sampling."""
    return SingleTrainer(replace(args, temperature=factor * args.temperature))
