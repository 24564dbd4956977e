"""Plain values, which a configuration may be made of: they can be written as YAML and as JSON, and read again."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tailrace.config.recipe_text import MAX_DEPTH
from tailrace.errors import quoted

_MAX_BITS = 1024
"""Maximum number of bits of an integer; the schema of a key says which integers it takes."""


class NotPlainError(ValueError):
    """Raised where a value cannot be part of a configuration; the message is one line that names its key."""


def plain(value: Any, key: str = "", depth: int = 0) -> Any:
    """Return `value` as mappings, lists, texts, numbers, truth values and None alone.

    Raises:
        NotPlainError: a part of `value` is none of these, cannot be written or has no end.
    """
    if depth > MAX_DEPTH:
        raise NotPlainError(f"{_named(key)} has more than {MAX_DEPTH} mappings and lists within one another")
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise NotPlainError(f"{_named(key)} has the key {quoted(name)}, which is no text; put it in quotes")
        prefix = f"{key}." if key else ""
        return {_text(name, key): plain(entry, prefix + name, depth + 1) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry, f"{key}.{number}", depth + 1) for number, entry in enumerate(value)]
    return _scalar(value, key)


def _scalar(value: Any, key: str) -> Any:
    match value:
        case None | bool():
            return value
        case int():
            if value.bit_length() > _MAX_BITS:  # Python would not write it
                raise NotPlainError(f"{_named(key)} is a whole number of more than {_MAX_BITS} bits")
            return int(value)
        case float():
            return float(value)
        case str() | Path():
            return _text(value if isinstance(value, str) else str(value), key)
    raise NotPlainError(
        f"{_named(key)} is of type {type(value).__name__}; expected a text, a number, true, false, null, a list or "
        "a mapping"
    )


def _text(text: str, key: str) -> str:
    if "\0" in text:
        raise NotPlainError(f"{_named(key)} has the character \\0, which no text of a recipe may have")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise NotPlainError(f"{_named(key)} has {text[error.start]!a}, which is no character; write UTF-8") from None
    return text[:]


def _named(key: str) -> str:
    return quoted(key)[1:-1] if key else "it"
