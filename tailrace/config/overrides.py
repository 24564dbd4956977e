"""`key=value` changes of a recipe, as plain values."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tailrace.config.recipe_text import RecipeSyntaxError, drops_a_comment, read_yaml
from tailrace.errors import ConfigError, quoted

_KEY = re.compile(r"[^\s.=\[\]{}+~$\"'\\]+(?:\.[^\s.=\[\]{}+~$\"'\\]+)*\Z")


def override_values(override: str) -> dict[str, Any]:
    """Return the contents of a recipe with this one key.

    Raises:
        ConfigError: the override is not of the form key=value.
    """
    key, separator, text = override.partition("=")
    named = f"the override {named_override(override)}"
    if not separator or not _KEY.match(key):
        raise ConfigError(f"{named} is not of the form key=value, such as trainer.lr=1e-5{_hint(key)}")
    try:
        value = read_yaml(text)
        cut = drops_a_comment(text)
    except RecipeSyntaxError as error:
        raise ConfigError(f"{named} cannot be read: {error}; a text can be put in quotes") from None
    if cut:
        raise ConfigError(f"{named} has a #, where YAML begins a comment; put the value in quotes")
    for part in reversed(key.split(".")):
        value = {part: value}
    return value  # type: ignore[no-any-return]


def leaves(key: str, value: Any) -> Iterator[str]:
    """Yield the dotted keys that a value gives: those below it, or its own where it has none."""
    if isinstance(value, dict) and value:
        for name, entry in value.items():
            yield from leaves(f"{key}.{name}", entry)
    else:
        yield key


def named_override(override: str) -> str:
    """Return an override's name in a message: its key in quotes. Its value is left out, since it may be a secret."""
    key = re.split(r"[=:\s]", override, maxsplit=1)[0]
    return quoted(key if key == override else f"{key}{override[len(key)]}…")


def _hint(key: str) -> str:
    if key[:1] in ("+", "~"):
        return f"; keys need no {key[0]}"
    if "[" in key:
        return f"; a list is given whole, as in {quoted(key.partition('[')[0], 40)[1:-1]}=[1,2]"
    return ""


def merged(values: Mapping[str, Any], change: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Return `values` with the changes of `change`. Another `type` drops the keys of the old variant, which the new one
    does not know.

    Raises:
        ConfigError: `change` has a key below an interpolation or a list.
    """
    if _chooses_another(values, change):
        values = {}
    result = dict(values)
    for key, new in change.items():
        old = result.get(key)
        if new and isinstance(new, dict) and (isinstance(old, list) or (isinstance(old, str) and "${" in old)):
            kind = "a list" if isinstance(old, list) else "an interpolation"
            raise ConfigError(f"{place}{key} is {kind}, which has no keys to change; give {place}{key} whole")
        if isinstance(old, dict) and isinstance(new, dict):
            new = merged(old, new, f"{place}{key}.")
        result[key] = new
    return result


def _chooses_another(values: Mapping[str, Any], change: Mapping[str, Any]) -> bool:
    old, new = values.get("type"), change.get("type")
    return isinstance(old, str) and isinstance(new, str) and old != new and "${" not in old + new
