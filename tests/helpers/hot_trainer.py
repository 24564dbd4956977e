"""A trainer of somebody's own whose log-probabilities are of another temperature than that of sampling."""

from dataclasses import replace

from tailrace.trainer.backends.single import SingleTrainer
from tailrace.trainer.base import TrainerArgs


def make(args: TrainerArgs, *, factor: float) -> SingleTrainer:
    """`factor`: of the temperature."""
    return SingleTrainer(replace(args, temperature=factor * args.temperature))
