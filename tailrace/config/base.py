"""The base of every configuration schema."""

import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, Strict

from tailrace.config.recipe_text import in_yaml
from tailrace.errors import TailraceError, quoted
from tailrace.host.cpu import multiplies_bfloat16

INTEGERS = range(-(2**63), 2**64)
"""The integers that JSON and the queue's messages can hold."""
_NAME_BYTES, _PATH_BYTES = 255, 4000
"""The longest file name and path, in bytes: what Linux and macOS allow, less some room for the files of a run."""


Item = TypeVar("Item")

Listed = Annotated[tuple[Item, ...], Strict(False)]
"""A list of a recipe, kept as a tuple; its items are checked as strictly as any key."""
Count = Annotated[int, Field(gt=0, le=10**9)]
"""A number of samples, tokens, rows or steps."""
CountFromZero = Annotated[int, Field(ge=0, le=10**9)]
Batch = Annotated[int, Field(gt=0, le=2**16)]
"""A number of sequences or rows that are held side by side."""
Processes = Annotated[int, Field(gt=0, le=1024)]
"""A number of processes or threads on one machine."""
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Bytes = Annotated[int, Field(gt=0, le=2**50)]
GIB = 2**30
"""Bytes in a GiB."""
LOWEST_TEMPERATURE = 0.001
"""The lowest temperature above 0. Log-probabilities are divided by it; a lower one leaves them no precision, or makes
them no numbers."""
Seconds = Annotated[float, Field(ge=0.001, le=1e6)]
"""A time limit. 1e6 s are eleven days, which is less than the longest wait of an operating system."""


def has_numbers_of_json(values: dict[str, Any]) -> dict[str, Any]:
    """Return `values`, whose numbers JSON and MessagePack can hold.

    Raises:
        ValueError: a number is not finite, or takes more than 64 bits.
    """
    for key, number in _numbers(values, ""):
        if isinstance(number, float) and not math.isfinite(number):
            raise ValueError(f"has {in_yaml(number)} at {key}, and a number has to be finite")
        if isinstance(number, int) and number not in INTEGERS:
            raise ValueError(f"has {quoted(number)} at {key}, which takes more than 64 bits")
    return values


def _numbers(value: Any, key: str) -> Iterator[tuple[str, int | float]]:
    if isinstance(value, int | float):
        yield key.removeprefix("."), value
    elif isinstance(value, dict | list):
        for name in value if isinstance(value, dict) else range(len(value)):
            yield from _numbers(value[name], f"{key}.{name}")


Keywords = Annotated[dict[str, Any], AfterValidator(has_numbers_of_json)]
"""Keyword arguments, under any names, for code that is not Tailrace's."""


def _is_device(text: str) -> str:
    if not re.fullmatch(r"cpu|mps|(cuda|xpu)(:\d{1,3})?", text):
        raise ValueError(f"is {quoted(text)}; expected cpu, cuda, cuda:N, xpu, xpu:N or mps")
    return text


Device = Annotated[str, AfterValidator(_is_device)]


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"is not a regular expression ({error})") from None
    return pattern


Pattern = Annotated[str, AfterValidator(_compiles)]
"""A Python regular expression."""


def path_of(text: str, what: str, refusal: type[TailraceError]) -> Path:
    """Return the path that a text means; see `expanded`.

    Raises:
        TailraceError: of the type `refusal`, where `expanded` refuses it: a line that begins with `what`.
    """
    try:
        return Path(expanded(text))
    except ValueError as error:
        raise refusal(f"{what} {error}") from None


def expanded(path: str) -> str:
    """Expand a path as a shell does: `~` and `~user` are home directories.

    Raises:
        ValueError: the path is a URL, has an unknown user, begins with a variable, or is too long for a file.
    """
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path):  # not shown: it may hold a password
        raise ValueError("is a URL, and has to be a path on this machine; download it first")
    full = os.path.expanduser(path)
    if full.startswith("~"):
        raise ValueError(f"{quoted(path)} begins with a user who is not known here; a file called so is ./~…")
    if full.startswith("$"):
        raise ValueError(
            f"{quoted(path)} begins with a variable, which only a shell replaces; use ~ or ${{oc.env:NAME}}; a file "
            "called so is ./$…"
        )
    if len(os.fsencode(full)) > _PATH_BYTES or any(len(os.fsencode(part)) > _NAME_BYTES for part in full.split("/")):
        raise ValueError(f"{quoted(path)} is too long: names have {_NAME_BYTES} bytes at most, paths {_PATH_BYTES}")
    return full


def path_text(path: Path) -> str:
    """Return an expanded path as the value of a recipe's key: `./` in front keeps it from being expanded again.

    `Path` drops the `./` of the text that it is made from.
    """
    return f"./{path}" if str(path).startswith(("~", "$")) else str(path)


PathText = Annotated[str, Field(min_length=1), AfterValidator(expanded)]
"""A path of a file or a directory, after `expanded`; a relative one starts at the working directory."""


class Config(BaseModel):
    """The base of schemas: frozen and keyword-only. Unknown keys are errors. The docstring under a field is its
    description, which only the reference page reads (config/reference.py).

    A value must already have the type of its key: `true`, `1.0` and `"1"` are no integers. An integer also counts as a
    number.
    """

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
    )

    _references: dict[tuple[int | str, ...], str] = PrivateAttr(default_factory=dict)

    @property
    def references(self) -> Mapping[tuple[int | str, ...], str]:
        """The `${…}` references of the recipe to texts from the environment, by the places of those texts."""
        return self._references

    def with_references(self, references: Mapping[tuple[int | str, ...], str]) -> Self:
        """Return a copy of this configuration with these `references`."""
        copy = self.model_copy()
        copy._references = dict(references)
        return copy

    @classmethod
    def part_of_training(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of a training recipe that this schema takes. `values` has only the keys that both schemas
        have."""
        return dict(values)

    @classmethod
    def default_type(cls, section: str, values: Mapping[str, Any]) -> str | None:
        """Return the default `type` of a section that names none in `values`. It is None where the section needs no
        type, or must name one."""
        field = cls.model_fields[section]
        return getattr(field.default, "type", None) if field.discriminator else None


def is_slow_in_bfloat16(values: Any) -> bool:
    """Return whether these values compute on this machine's CPU, and that CPU is slow in bfloat16.

    The machines of a cluster that the run joins are not known, so the answer for those is no.
    """
    if not isinstance(values, dict) or str(values.get("device", "cpu")).partition(":")[0] != "cpu":
        return False
    return key_of(values.get("cluster"), "address", None) is None and not multiplies_bfloat16()


def with_default(section: Any, key: str, value: Any) -> Any:
    """Return a section, a mapping or an object, with another default of one key."""
    if isinstance(section, dict):
        return {key: value, **section}
    if isinstance(section, Config) and key not in section.model_fields_set:
        return section.model_copy(update={key: value})
    return section


def key_of(section: Any, key: str, default: Any) -> Any:
    """Return a key of a section, which is a mapping, an object, or missing."""
    return section.get(key, default) if isinstance(section, dict) else getattr(section, key, default)
