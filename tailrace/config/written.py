r"""A configuration as plain values again: to be read back from `config.yaml`, or to be shown.

Texts that a recipe took from the environment (`${oc.env:KEY}`) stay references in both, so no file of a run has what
they stand for. Beyond that, what is shown has `***` in place of secrets: texts in mappings of one's own, such as
`rewards.grader.arguments`, whose key says that they are one, and passwords in URLs.
"""

import re
from collections.abc import Mapping
from typing import Any

from tailrace.config.base import Config

MASK = "***"

_INTERPOLATION = re.compile(r"(\\*)\$\{")
_REFERENCE = re.compile(r"\$\{[^{},]*\}")
_URL_PASSWORD = re.compile(r"(\w://[^\s/@:]*:)(?!\$\{)[^\s/@]+(?=@)")
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_SECRET = re.compile(r"apikey|auth|authorization|bearer|cookie|credentials?|pass(?:phrase|wd|word)|pwd|secrets?")
_SECRET_LAST = re.compile(r"keys?|pickled|token")


def written(config: Config) -> dict[str, Any]:
    """Values that `load_as` makes `config` of."""
    return {key: _written(value, (key,), config.references) for key, value in config.model_dump(mode="json").items()}


def shown(config: Config) -> dict[str, Any]:
    """Values for people, and for files that others may see."""
    return {key: masked(value, key) for key, value in written(config).items()}


def masked(value: Any, key: str = "") -> Any:
    """`value`, as it is called, without secrets."""
    if isinstance(value, Mapping):
        return {name: masked(entry, key if _is_secret(key) else str(name)) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [masked(entry, key) for entry in value]
    if value is None or isinstance(value, bool) or value == "":
        return value
    if _is_secret(key):  # a reference may have a value of its own where the environment has none
        return value if isinstance(value, str) and _REFERENCE.fullmatch(value) else MASK
    if not isinstance(value, str):
        return value
    return _URL_PASSWORD.sub(rf"\1{MASK}", value)


def is_interpolated(text: str) -> bool:
    """Whether there is a `${…}` to be resolved in `text`."""
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
