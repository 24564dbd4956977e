"""The name of the task that a prompt is of, as its source has it."""

from collections.abc import Mapping
from typing import Any

_NAMES = ("source_dataset", "task", "data_source")
"""Entries of metadata that name it: that of reasoning-gym, of a file's own column, and of the files of verl."""
_LONGEST = 64
"""Letters of a name. A longer text is no name."""


def task_name(metadata: Mapping[str, Any]) -> str:
    """Return the name of a prompt's task, by which prompts of one task are alike; empty where its source has none."""
    found = (metadata.get(name) for name in _NAMES)
    return next((name for name in found if isinstance(name, str) and 0 < len(name) <= _LONGEST), "")
