"""The arguments that a reward function asks for by the names of its parameters."""

import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any

from tailrace.config.rewards import FunctionReward, GivenReward
from tailrace.errors import UserError, did_you_mean
from tailrace.rewards.base import GradingRequest

NAMES = GradingRequest.__struct_fields__
"""The arguments that a function can ask for."""


def asked_for(config: FunctionReward | GivenReward, function: Callable[..., Any], key: str) -> tuple[str, ...]:
    """The `NAMES` that `function` has parameters for; all of them if it takes any keyword.

    `key`: that of the grader in the recipe.

    Raises:
        UserError: the function cannot be called with them and the recipe's arguments.
    """
    named = f"reward {config.name!r}" if isinstance(config, GivenReward) else f"{key}.path {config.path!r}"
    call = f"{named} is called by name with {', '.join(NAMES)} and {key}.arguments"
    try:
        parameters = inspect.signature(function).parameters
    except (ValueError, TypeError):  # a builtin may have none
        raise UserError(f"{call}, and does not say which of them it takes; write a function around it") from None
    if clash := config.arguments.keys() & NAMES:
        raise UserError(f"{key}.arguments has {sorted(clash)[0]!r}, which names a part of the data; rename it")
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
