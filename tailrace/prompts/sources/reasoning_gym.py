"""Problems of a reasoning-gym generator."""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

from tailrace.config.prompts import ReasoningGymSource
from tailrace.errors import PromptError, did_you_mean, one_line
from tailrace.prompts.sources.base import Row

with warnings.catch_warnings():
    warnings.simplefilter("ignore", SyntaxWarning)  # from a dependency, when it is compiled at first use
    import reasoning_gym  # type: ignore[import-untyped]
    from reasoning_gym.composite import DatasetSpec  # type: ignore[import-untyped]
    from reasoning_gym.factory import DATASETS  # type: ignore[import-untyped]

_GENERATOR_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""The errors of a generator's own checks, and of values that it does not check."""


def reasoning_gym_rows(config: ReasoningGymSource, key: str) -> Iterator[Row]:
    """Yield generated problems. Ids are `task:index`; metadata is the entry's, with the generator's `parameters`.

    `key`: the key of the source in the recipe.

    JSON has neither tuples nor integer keys, but scorers compare them. So a tuple is kept as {"$tuple": [...]}, and a
    mapping with keys other than strings as {"$map": [[key, value], ...]}.

    Raises:
        PromptError: there is no such task, or the generator refuses its parameters.
    """
    _check(config, key)
    try:
        generator = reasoning_gym.create_dataset(
            config.task, seed=config.seed, size=config.size, **_arguments(config.parameters)
        )
        for index in range(config.size):
            entry = generator[index]
            yield Row(
                prompt_id=f"{config.task}:{index}",
                prompt=entry["question"],
                answer=None if entry["answer"] is None else str(entry["answer"]),
                metadata={**keep(entry["metadata"]), "parameters": _parameters_of(entry, config)},
            )
    except _GENERATOR_ERRORS as error:
        raise PromptError(f"reasoning-gym task {config.task!r} with {config.parameters}: {one_line(error)}") from None


def keep(value: Any) -> Any:
    """Convert `value` to JSON with the marks `$tuple` and `$map`.

    Raises:
        TypeError: it holds anything but numbers, strings, lists, tuples and mappings.
    """
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {str(key): keep(item) for key, item in value.items()}
        return {"$map": [[keep(key), keep(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"$tuple": [keep(item) for item in value]}
    if isinstance(value, list):
        return [keep(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    return _plain_scalar(value)


def _plain_scalar(value: Any) -> str | int | float:
    """Convert numpy's strings and numbers to Python's."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"its metadata holds a {type(value).__name__}, which cannot be written as JSON")


def _arguments(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The generator's arguments. In a recipe, the `datasets` of the task `composite`, a mixture, are mappings."""
    if "datasets" not in parameters:
        return dict(parameters)
    return {**parameters, "datasets": [DatasetSpec(**{"config": {}, **spec}) for spec in parameters["datasets"]]}


def _parameters_of(entry: Mapping[str, Any], config: ReasoningGymSource) -> dict[str, Any]:
    """The parameters of the task that made `entry`, which its scorer may need; a mixture makes no entries itself."""
    parts = config.parameters.get("datasets", [])
    name = entry["metadata"]["source_dataset"]
    return next((part.get("config", {}) for part in parts if part["name"] == name), config.parameters)


def _check(config: ReasoningGymSource, key: str) -> None:
    if config.task not in DATASETS:
        raise PromptError(
            f"{key}.task {config.task!r} is none of reasoning-gym's {len(DATASETS)} tasks"
            f"{did_you_mean(config.task, DATASETS)}"
        )
    known = {field.name for field in fields(DATASETS[config.task][1])} - {"seed", "size"}
    for name in config.parameters:
        if name in ("seed", "size"):
            raise PromptError(f"{key}.parameters: set {key}.{name} instead of {name}")
        if name not in known:
            hint = did_you_mean(name, known) or f"; it has {', '.join(sorted(known))}"
            raise PromptError(f"{key}.parameters: {config.task} has no parameter {name!r}{hint}")
