"""Makes the grader that a configuration names."""

from tailrace.config.rewards import (
    ExactReward,
    FunctionReward,
    GivenReward,
    GroupFunctionReward,
    JudgeReward,
    MathReward,
    ModelReward,
    ReasoningGymReward,
    RegexReward,
)
from tailrace.config.rewards import Grader as GraderConfig
from tailrace.rewards.base import AsyncGrader, Grader


def make_grader(config: GraderConfig, key: str = "rewards.grader") -> Grader | AsyncGrader:
    """Make the grader of `config.type`. Its libraries are imported only then. `key`: its key in the recipe.

    Raises:
        UserError: the grader cannot be made, such as for a dotted path that leads nowhere.
    """
    match config:
        case ExactReward():
            from tailrace.rewards.exact import ExactGrader

            return ExactGrader(config)
        case RegexReward():
            from tailrace.rewards.regex import RegexGrader

            return RegexGrader(config)
        case MathReward():
            from tailrace.rewards.math import MathGrader

            return MathGrader(config)
        case ReasoningGymReward():
            from tailrace.rewards.reasoning_gym import ReasoningGymGrader

            return ReasoningGymGrader(config)
        case FunctionReward() | GivenReward():
            from tailrace.rewards.function import make_function_grader

            return make_function_grader(config, key)
        case GroupFunctionReward():
            from tailrace.rewards.function import make_group_function_grader

            return make_group_function_grader(config, key)
        case JudgeReward():
            from tailrace.rewards.judge import JudgeGrader

            return JudgeGrader(config, key)
        case ModelReward():
            from tailrace.rewards.reward_model import RewardModelGrader

            return RewardModelGrader(config, key)
