"""Rewards with any Python function."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tailrace.config.rewards import FunctionReward, GivenReward
from tailrace.host.user_code import load_callable
from tailrace.rewards.arguments import asked_for
from tailrace.rewards.base import AsyncGrader, Grader, GradingRequest
from tailrace.rewards.given import given_function


def make_function_grader(config: FunctionReward | GivenReward, key: str) -> Grader | AsyncGrader:
    """Make a grader that calls the function of `config`. `key`: that of the grader in the recipe.

    The function gets the arguments that its parameters name, and those of the recipe. If it is asynchronous, the grader
    does several gradings at a time.

    Raises:
        UserError: there is no such module or attribute, or the signature is wrong.
    """
    function = given_function(config) if isinstance(config, GivenReward) else load_callable(f"{key}.path", config.path)
    asked = asked_for(config, function, key)

    def call(request: GradingRequest) -> Any:
        return function(**{name: getattr(request, name) for name in asked}, **config.arguments)

    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return AsyncFunctionGrader(call, config.concurrency)
    return FunctionGrader(call)


class FunctionGrader(Grader):
    """Calls a plain function."""

    def __init__(self, call: Callable[[GradingRequest], Any]) -> None:
        self._call = call

    def grade(self, request: GradingRequest) -> float | bool | Mapping[str, float]:
        """See `Grader`."""
        result: float | bool | Mapping[str, float] = self._call(request)
        return result


class AsyncFunctionGrader(AsyncGrader):
    """Awaits an asynchronous function."""

    def __init__(self, call: Callable[[GradingRequest], Any], concurrency: int) -> None:
        self._call = call
        self.concurrency = concurrency

    async def grade(self, request: GradingRequest) -> float | bool | Mapping[str, float]:
        """See `AsyncGrader`."""
        result: float | bool | Mapping[str, float] = await self._call(request)
        return result
