"""What people bring themselves: any callable, by its dotted path. Imports no torch."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from tailrace.errors import UserError, did_you_mean


def load_callable(key: str, path: str) -> Callable[..., Any]:
    """Import `package.module.name`; the working directory is importable.

    Args:
        key: where a recipe says so, for messages.
        path: its value.

    Raises:
        UserError: one line that says which part of the path is wrong.
    """
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise UserError(f"{key} {path!r} must be a dotted path to a function, such as my_module.my_function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = _import(module_name, key, path)
    if not hasattr(module, name):
        hint = did_you_mean(name, dir(module))
        raise UserError(f"{key} {path!r}: module {module_name!r} has no {name!r}{hint}")
    function = getattr(module, name)
    if not callable(function):
        raise UserError(f"{key} {path!r} is of type {type(function).__name__}, not a function")
    if inspect.iscoroutinefunction(function):
        raise UserError(f"{key} {path!r} is an async function; it must be a plain one")
    return function  # type: ignore[no-any-return]


def check_call(key: str, path: str, function: Callable[..., Any], *arguments: str, **keywords: Any) -> None:
    """Whether `function` takes as many arguments by position as there are names in `arguments`, and these keywords.

    Raises:
        UserError: it does not.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin may have none
        return
    try:
        signature.bind(*arguments, **keywords)
    except TypeError as error:
        call = ", ".join((*arguments, *(f"{name}=" for name in keywords)))
        raise UserError(f"{key} {path!r} cannot be called with ({call}): {error}") from None


def _import(module_name: str, key: str, path: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(
                f"{key} {path!r}: no module {error.name!r} in {os.getcwd()} or among the installed ones"
            ) from None
        raise
