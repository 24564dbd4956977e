"""From an algorithm's configuration to the algorithm."""

from tailrace.algorithms.base import Algorithm
from tailrace.algorithms.grpo import Grpo
from tailrace.config.algorithm import GrpoConfig


def make_algorithm(config: GrpoConfig) -> Algorithm:
    """The algorithm that `config` describes."""
    return Grpo(config)
