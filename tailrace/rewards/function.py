"""Rewards with any Python function."""

import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any

from tailrace.config.rewards import FunctionReward
from tailrace.errors import UserError, did_you_mean
from tailrace.rewards.base import Grader, GradingRequest
from tailrace.user_code import load_callable

KEY = "rewards.grader.path"
NAMES = GradingRequest.__struct_fields__
"""What a function can ask for."""


class FunctionGrader(Grader):
    """Calls a function with what it asks for by the names of its parameters, and with the recipe's arguments."""

    def __init__(self, config: FunctionReward) -> None:
        """
        Raises:
            UserError: the module, the attribute or the signature is not as needed.
        """
        self._function = load_callable(KEY, config.path)
        self._arguments = config.arguments
        self._asked = asked_for(config, self._function)

    def grade(self, request: GradingRequest) -> float | bool | Mapping[str, float]:
        result: float | bool | Mapping[str, float] = self._function(
            **{name: getattr(request, name) for name in self._asked}, **self._arguments
        )
        return result


def asked_for(config: FunctionReward, function: Callable[..., Any]) -> tuple[str, ...]:
    """Those of `NAMES` that `function` has a parameter for, all of them where it takes any keyword.

    Raises:
        UserError: it cannot be called with them and the recipe's arguments.
    """
    call = f"{KEY} {config.path!r} is called by name with {', '.join(NAMES)} and rewards.grader.arguments"
    try:
        parameters = inspect.signature(function).parameters
    except (ValueError, TypeError):  # a builtin may have none
        raise UserError(f"{call}, and does not say which of them it takes; write a function around it") from None
    if clash := config.arguments.keys() & NAMES:
        raise UserError(f"rewards.grader.arguments has {sorted(clash)[0]!r}, which names a part of the data; rename it")
    any_keyword = any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
    asked = tuple(name for name in NAMES if any_keyword or name in parameters)
    try:
        inspect.signature(function).bind(**dict.fromkeys(asked), **config.arguments)
    except TypeError as error:
        known = {*NAMES, *config.arguments}
        strange = next((name for name, p in parameters.items() if name not in known and _is_required(p)), None)
        hint = did_you_mean(strange, known) if strange else ""
        raise UserError(f"{call}; it cannot be: {error}{hint}") from None
    if not asked:
        raise UserError(f"{call}; it has a parameter for none of them")
    return asked


def _is_required(parameter: Parameter) -> bool:
    return parameter.default is Parameter.empty
