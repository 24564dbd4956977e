"""Makes the grader that a configuration names."""

from typing import TYPE_CHECKING

from tailrace.rewards.base import AsyncGrader, Grader

if TYPE_CHECKING:
    from tailrace.config.rewards import Grader as GraderConfig


def make_grader(config: "GraderConfig", key: str = "rewards.grader") -> Grader | AsyncGrader:
    """Make the grader of `config.type`. Its libraries are imported only then. `key`: its key in the recipe.

    A grader reads the keys of its configuration, and nothing else of it: in a grading process that is no schema.

    Raises:
        UserError: the grader cannot be made, such as for a dotted path that leads nowhere.
    """
    match config.type:
        case "exact":
            from tailrace.rewards.exact import ExactGrader

            return ExactGrader(config)
        case "regex":
            from tailrace.rewards.regex import RegexGrader

            return RegexGrader(config)
        case "integer":
            from tailrace.rewards.integer import IntegerGrader

            return IntegerGrader(config)
        case "math":
            from tailrace.rewards.math import MathGrader

            return MathGrader(config)
        case "reasoning_gym":
            from tailrace.rewards.reasoning_gym import ReasoningGymGrader

            return ReasoningGymGrader(config)
        case "function" | "given":
            from tailrace.rewards.function import make_function_grader

            return make_function_grader(config, key)
        case "group_function":
            from tailrace.rewards.function import make_group_function_grader

            return make_group_function_grader(config, key)
        case "judge":
            from tailrace.rewards.judge import JudgeGrader

            return JudgeGrader(config, key)
        case "reward_model":
            from tailrace.rewards.reward_model import RewardModelGrader

            return RewardModelGrader(config, key)
