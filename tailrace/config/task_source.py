"""A TASK on a command line: a source of prompts in a few words, such as `reasoning_gym:chain_sum,size=50`."""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic.fields import FieldInfo

from tailrace.config.base import path_of, path_text
from tailrace.config.overrides import merged, override_values
from tailrace.config.prompts import TAKEN_NAMES, AnySource, ColumnsConfig
from tailrace.config.shorthand import file_type
from tailrace.errors import ConfigError, did_you_mean, quoted

_TYPES: Mapping[str, type[Any]] = {source.model_fields["type"].default: source for source in get_args(AnySource)}
_OF_A_TASK: Mapping[str, Mapping[str, Any]] = {
    "hub": {"split": "test"},
    "reasoning_gym": {"size": 200, "seed": 1_000_000},
}
"""Defaults of a source that is evaluated, which is not to be what is trained on. A generator makes its problem i from
the seed `seed` + i."""
_SETTING = re.compile(r",(?=[A-Za-z_][\w.]*=)")
_FORMS = "a .jsonl or .parquet file, a directory of save_to_disk, or TYPE:NAME such as reasoning_gym:chain_sum"


def task_sources(tasks: Sequence[str], columns: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the sources of tasks as sections of a recipe, by names for their sets of prompts.

    Args:
        tasks: each is SOURCE or SOURCE,KEY=VALUE,…: SOURCE is a file, a directory, or the source's type with a colon
            and its file, generator or data set. The keys are those of the source in a recipe.
        columns: a source of a recipe; a task of its type has its keys for the columns, too.

    Raises:
        ConfigError: a task names no source, or a setting is malformed.
    """
    sources: dict[str, dict[str, Any]] = {}
    for task in tasks:
        head, *settings = _SETTING.split(task)
        kind, value = _type_and_value(head)
        inherited = {key: columns[key] for key in ColumnsConfig.model_fields if key in columns}
        of_recipe = inherited if columns.get("type") == kind else {}
        source = {"type": kind, **_OF_A_TASK.get(kind, {}), **of_recipe, _first_key(kind): value}
        for setting in settings:
            source = merged(source, override_values(setting))
        sources[_free_name(value, kind, {*sources, *TAKEN_NAMES})] = source
    return sources


def _type_and_value(head: str) -> tuple[str, str]:
    kind, colon, value = head.partition(":")
    if colon and value and kind in _TYPES:
        return kind, value
    path = path_of(head, "the task", ConfigError)
    if head == "-":
        return "jsonl", "/dev/stdin"
    if (of_path := file_type(path) or ("dataset" if path.is_dir() else None)) is not None:
        return of_path, path_text(path)
    raise ConfigError(f"the task {quoted(head)} is no source of prompts; give {_FORMS}{did_you_mean(kind, _TYPES)}")


def _first_key(kind: str) -> str:
    """Return the key that a source must have: its path, its name or its task."""
    fields: Mapping[str, FieldInfo] = _TYPES[kind].model_fields
    return next(name for name, field in fields.items() if field.is_required())


def _free_name(value: str, kind: str, taken: Collection[str]) -> str:
    """Return a name for a set of prompts: the last part of its file, generator or data set."""
    stem = Path(value).stem if "path" in _first_key(kind) else Path(value).name
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", stem)[:60].strip("-_") or kind
    return next(free for free in (name, *(f"{name}-{number}" for number in range(2, 10_000))) if free not in taken)
