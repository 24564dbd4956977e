"""Makes the policy of a recipe's `rollout.dispatch`."""

from tailrace.config.rollout import DispatchConfig
from tailrace.planning.dispatch.balanced import Balanced
from tailrace.planning.dispatch.base import Policy
from tailrace.planning.dispatch.simple import LeastLoaded, Pull, Random, RoundRobin
from tailrace.planning.dispatch.skewness import Skewness
from tailrace.planning.remaining import LengthHistory


def make_policy(config: DispatchConfig, history: LengthHistory, *, seed: int) -> Policy:
    """Make the policy of this name. `history`: the lengths of finished responses. `seed`: of the policy random."""
    match config.policy:
        case "pull":
            return Pull()
        case "round_robin":
            return RoundRobin()
        case "least_loaded":
            return LeastLoaded()
        case "random":
            return Random(seed)
        case "streamrl":
            return Skewness(history, alpha=config.alpha)
        case "skewness_aware":
            return Balanced()
