r"""Plain values of a configuration, to be read back from `config.yaml`, or to be shown.

Texts that a recipe took from the environment (`${oc.env:KEY}`) stay references in both, so no file of a run has their
values. Values that are shown also have `***` in place of secrets. Secrets are texts in free mappings, such as
`rewards.grader.arguments`, whose key says that they are secret. In URLs they are the part before the `@`, and the
values of a query whose names say that they are secret.
"""

import re
from collections.abc import Mapping
from typing import Any

from tailrace.config.base import Config

MASK = "***"

_INTERPOLATION = re.compile(r"(\\*)\$\{")
_REFERENCE = re.compile(r"\$\{[^{},]*\}")
_USER = re.compile(r"(?<=://)(?:[^\s/?#:]*:\S+|[^\s/?#:]+)(?=@)")
"""The user part of a URL. It ends at the last `@`, since a password may contain one, or a `/`. Without a colon it may
be a token."""
_QUERY_VALUE = re.compile(r"([?&;#])([^\s?&;#=]+)=([^\s&;#]+)")
_NO_SECRET = re.compile(r"([^:\\]*:)?")
"""Text that may stand beside references: the name of a user."""
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_SECRET = re.compile(r"apikey|auth|authorization|bearer|cookie|credentials?|pass(?:phrase|wd|word)|pwd|secrets?")
_SECRET_LAST = re.compile(r"keys?|pickled|sig(?:nature)?|token")


def written(config: Config) -> dict[str, Any]:
    """Return the values from which `load_as` makes `config`."""
    return {key: _written(value, (key,), config.references) for key, value in config.model_dump(mode="json").items()}


def shown(config: Config) -> dict[str, Any]:
    """Return values for people, and for files that others may see."""
    return {key: masked(value, key) for key, value in written(config).items()}


def masked(value: Any, key: str = "") -> Any:
    """Return `value`, which is named `key`, without secrets."""
    if isinstance(value, Mapping):
        return {name: masked(entry, key if _is_secret(key) else str(name)) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [masked(entry, key) for entry in value]
    if value is None or isinstance(value, bool) or value == "":
        return value
    if _is_secret(key):  # a reference may contain a default for a missing variable, which may be a secret
        return value if isinstance(value, str) and _REFERENCE.fullmatch(value) else MASK
    if not isinstance(value, str):
        return value
    return _QUERY_VALUE.sub(_masked_query, _USER.sub(_masked_user, value)) if "://" in value else value


def _masked_user(user: re.Match[str]) -> str:
    text = user[0]
    return text if _REFERENCE.search(text) and _NO_SECRET.fullmatch(_REFERENCE.sub("", text)) else MASK


def _masked_query(entry: re.Match[str]) -> str:
    mark, name, value = entry.groups()
    return f"{mark}{name}={masked(value, name)}"


def is_interpolated(text: str) -> bool:
    """Return whether `text` has a `${…}` to be resolved."""
    return any(len(match[1]) % 2 == 0 for match in _INTERPOLATION.finditer(text))


def _is_secret(key: str) -> bool:
    words = [word.lower() for word in _WORDS.findall(key)]
    return any(map(_SECRET.fullmatch, words)) or bool(words and _SECRET_LAST.fullmatch(words[-1]))


def _written(value: Any, place: tuple[int | str, ...], references: Mapping[tuple[int | str, ...], str]) -> Any:
    if place in references:
        return references[place]
    if isinstance(value, dict):
        return {key: _written(entry, (*place, key), references) for key, entry in value.items()}
    if isinstance(value, list):
        return [_written(entry, (*place, number), references) for number, entry in enumerate(value)]
    return _INTERPOLATION.sub(lambda match: rf"{match[1] * 2}\${{", value) if isinstance(value, str) else value
