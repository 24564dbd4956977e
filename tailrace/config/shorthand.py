"""What `tailrace generate` takes beside `key=value`: prompts, and an option that stands for a key."""

import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from tailrace.errors import nearest

_OVERRIDE = re.compile(r"([A-Za-z_]\w*)(\.[A-Za-z_]\w*)*=")


def split_arguments(arguments: Iterable[str], keys: Collection[str]) -> tuple[list[str], list[str]]:
    """Prompts, and `key=value` overrides, whose keys begin with one of `keys`, or with what must have meant one."""
    texts: list[str] = []
    overrides: list[str] = []
    for argument in arguments:
        match = _OVERRIDE.match(argument)
        (overrides if match and nearest(match[1], keys) else texts).append(argument)
    return texts, overrides


def source_override(prompts: Path) -> str:
    """The override that `--prompts` stands for."""
    kind = "parquet" if prompts.suffix == ".parquet" else "jsonl"
    return f"prompts.source={{type: {kind}, path: {json.dumps(str(prompts))}, answer_column: null}}"


def model_override(model: str) -> str:
    """The override that the argument MODEL stands for."""
    return f"model.path={json.dumps(model)}"
