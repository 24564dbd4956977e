"""The arguments that a reward function asks for by the names of its parameters."""

import inspect
from collections.abc import Callable, Sequence
from inspect import Parameter
from typing import TYPE_CHECKING, Any

from tailrace.errors import UserError, did_you_mean
from tailrace.rewards.base import GradingRequest

if TYPE_CHECKING:
    from tailrace.config.rewards import FunctionReward, GivenReward, GroupFunctionReward

NAMES = GradingRequest.__struct_fields__
"""The arguments that a function of one response can ask for."""
_OF_PROMPT = ("prompt", "question", "answer", "metadata")
_OF_EACH = {"responses": "response", "tokens": "tokens", "finish_reasons": "finish_reason"}
"""The arguments that are lists, and the names of their entries in requests."""
GROUP_NAMES = (*_OF_PROMPT, *_OF_EACH)
"""The arguments that a function of a group can ask for."""


def of_group(name: str, requests: Sequence[GradingRequest]) -> Any:
    """The value of one of `GROUP_NAMES` for the responses to one prompt."""
    if name in _OF_PROMPT:
        return getattr(requests[0], name)
    return [getattr(request, _OF_EACH[name]) for request in requests]


def asked_for(
    config: "FunctionReward | GroupFunctionReward | GivenReward",
    function: Callable[..., Any],
    key: str,
    names: Sequence[str],
) -> tuple[str, ...]:
    """Those of `names` that `function` has parameters for; all of them if it takes any keyword.

    `key`: that of the grader in the recipe.

    Raises:
        UserError: the function cannot be called with them and the recipe's arguments.
    """
    named = f"reward {config.name!r}" if config.type == "given" else f"{key}.path {config.path!r}"
    call = f"{named} is called by name with {', '.join(names)} and {key}.arguments"
    try:
        parameters = inspect.signature(function).parameters
    except (ValueError, TypeError):  # a builtin may have none
        raise UserError(f"{call}, and does not say which of them it takes; write a function around it") from None
    if clash := config.arguments.keys() & set(names):
        raise UserError(f"{key}.arguments has {sorted(clash)[0]!r}, which names a part of the data; rename it")
    any_keyword = any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
    asked = tuple(name for name in names if any_keyword or name in parameters)
    try:
        inspect.signature(function).bind(**dict.fromkeys(asked), **config.arguments)
    except TypeError as error:
        known = {*names, *config.arguments}
        strange = next((name for name, p in parameters.items() if name not in known and _is_required(p)), None)
        hint = did_you_mean(strange, known) if strange else ""
        raise UserError(f"{call}; it cannot be: {error}{hint}") from None
    if not asked:
        raise UserError(f"{call}; it has a parameter for none of them")
    return asked


def _is_required(parameter: Parameter) -> bool:
    return parameter.default is Parameter.empty
