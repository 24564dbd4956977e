"""Rewards with any Python function."""

from tailrace.config.rewards import FunctionReward
from tailrace.rewards.base import Grader, GradingRequest
from tailrace.user_code import check_call, load_callable

KEY = "rewards.grader.path"


class FunctionGrader(Grader):
    """Calls `f(response, answer, prompt, metadata, **arguments)`, the first four by position."""

    def __init__(self, config: FunctionReward) -> None:
        """
        Raises:
            UserError: the module, the attribute or the signature is not as needed.
        """
        self._function = load_callable(KEY, config.path)
        self._arguments = config.arguments
        check_call(KEY, config.path, self._function, "response", "answer", "prompt", "metadata", **config.arguments)

    def grade(self, request: GradingRequest) -> float:
        result: float = self._function(
            request.response, request.answer, request.prompt, dict(request.metadata), **self._arguments
        )
        return result
