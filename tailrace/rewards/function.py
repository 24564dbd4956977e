"""Rewards with any Python function."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tailrace.config.rewards import FunctionReward
from tailrace.errors import UserError, did_you_mean
from tailrace.rewards.base import Grader, GradingRequest


class FunctionGrader(Grader):
    """Calls `f(response, answer, prompt, metadata, **arguments)`, the first four by position."""

    def __init__(self, config: FunctionReward) -> None:
        """
        Raises:
            UserError: the module, the attribute or the signature is not as needed.
        """
        self._function = load_function(config.path)
        self._arguments = config.arguments
        _check_signature(config.path, self._function, config.arguments)

    def grade(self, request: GradingRequest) -> float:
        result: float = self._function(
            request.response, request.answer, request.prompt, dict(request.metadata), **self._arguments
        )
        return result


def load_function(path: str) -> Callable[..., Any]:
    """Import `package.module.function`; the working directory is importable.

    Raises:
        UserError: one line that says which part of the path is wrong.
    """
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise UserError(f"rewards.grader.path {path!r} must be a dotted path to a function, such as my_rewards.score")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = _import(module_name, path)
    if not hasattr(module, name):
        hint = did_you_mean(name, dir(module))
        raise UserError(f"rewards.grader.path {path!r}: module {module_name!r} has no {name!r}{hint}")
    function = getattr(module, name)
    if not callable(function):
        raise UserError(f"rewards.grader.path {path!r} is of type {type(function).__name__}, not a function")
    if inspect.iscoroutinefunction(function):
        raise UserError(f"rewards.grader.path {path!r} is an async function; it must be a plain one")
    return function  # type: ignore[no-any-return]


def _import(module_name: str, path: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(
                f"rewards.grader.path {path!r}: no module {error.name!r} in {os.getcwd()} or among the installed ones"
            ) from None
        raise


def _check_signature(path: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin may have none
        return
    try:
        signature.bind("", None, "", {}, **arguments)
    except TypeError as error:
        named = "".join(f", {name}=" for name in arguments)
        raise UserError(
            f"rewards.grader.path {path!r} cannot be called with (response, answer, prompt, metadata{named}): {error}"
        ) from None
