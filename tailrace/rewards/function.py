"""Rewards with any Python function of a response, or of all responses to a prompt."""

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tailrace.host.user_code import load_callable
from tailrace.rewards.arguments import GROUP_NAMES, NAMES, asked_for, of_group
from tailrace.rewards.base import AsyncGrader, Grader, GradingRequest, Result

if TYPE_CHECKING:
    from tailrace.config.rewards import FunctionReward, GivenReward, GroupFunctionReward


def make_function_grader(config: "FunctionReward | GivenReward", key: str) -> Grader | AsyncGrader:
    """Make a grader that calls the function of `config`. `key`: that of the grader in the recipe.

    The function gets the arguments that its parameters name, and those of the recipe. If it is asynchronous, the grader
    does several gradings at a time.

    Raises:
        UserError: there is no such module or attribute, or the signature is wrong.
    """
    if config.type == "given":
        from tailrace.rewards.given import given_function  # slow: it has the schemas

        function = given_function(config)
    else:
        function = load_callable(f"{key}.path", config.path)
    asked = asked_for(config, function, key, NAMES)

    def call(request: GradingRequest) -> Any:
        return function(**{name: getattr(request, name) for name in asked}, **config.arguments)

    return AsyncFunctionGrader(call, config.concurrency) if is_async(function) else FunctionGrader(call)


def make_group_function_grader(config: "GroupFunctionReward", key: str) -> Grader | AsyncGrader:
    """Make a grader that calls the function of `config` once for all responses to a prompt; see `make_function_grader`.

    Raises:
        UserError: there is no such module or attribute, or the signature is wrong.
    """
    function = load_callable(f"{key}.path", config.path)
    asked = asked_for(config, function, key, GROUP_NAMES)

    def call(requests: Sequence[GradingRequest]) -> Any:
        return function(**{name: of_group(name, requests) for name in asked}, **config.arguments)

    return AsyncGroupFunctionGrader(call, config.concurrency) if is_async(function) else GroupFunctionGrader(call)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call of `function` gives something to be awaited."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


class FunctionGrader(Grader):
    """Calls a plain function."""

    def __init__(self, call: Callable[[GradingRequest], Any]) -> None:
        self._call = call

    def grade(self, request: GradingRequest) -> Result:
        """See `Grader`."""
        result: Result = self._call(request)
        return result


class AsyncFunctionGrader(AsyncGrader):
    """Awaits an asynchronous function."""

    def __init__(self, call: Callable[[GradingRequest], Any], concurrency: int) -> None:
        self._call = call
        self.concurrency = concurrency

    async def grade(self, request: GradingRequest) -> Result:
        """See `AsyncGrader`."""
        result: Result = await self._call(request)
        return result


class GroupFunctionGrader(Grader):
    """Calls a plain function with all responses of a group."""

    def __init__(self, call: Callable[[Sequence[GradingRequest]], Any]) -> None:
        self._call = call

    def grade(self, request: GradingRequest) -> Result:
        """See `Grader`: the response is a group of one."""
        (result,) = self.grade_all([request])
        return result

    def grade_all(self, requests: Sequence[GradingRequest]) -> Sequence[Result]:
        """See `Grader`."""
        results: Sequence[Result] = self._call(requests)
        return results


class AsyncGroupFunctionGrader(AsyncGrader):
    """Awaits an asynchronous function of all responses of a group."""

    def __init__(self, call: Callable[[Sequence[GradingRequest]], Any], concurrency: int) -> None:
        self._call = call
        self.concurrency = concurrency

    async def grade(self, request: GradingRequest) -> Result:
        """See `AsyncGrader`: the response is a group of one."""
        (result,) = await self.grade_all([request])
        return result

    async def grade_all(self, requests: Sequence[GradingRequest]) -> Sequence[Result]:
        """See `AsyncGrader`."""
        results: Sequence[Result] = await self._call(requests)
        return results
