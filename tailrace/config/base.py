"""The base of every configuration schema."""

import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, Strict

from tailrace.config.recipe_text import in_yaml
from tailrace.errors import quoted
from tailrace.host.cpu import multiplies_bfloat16

INTEGERS = range(-(2**63), 2**64)
"""Those that JSON and the messages of the queue hold."""
_NAME_BYTES, _PATH_BYTES = 255, 4000
"""What Linux and macOS have room for, with some left for what a run makes in its directory."""


Item = TypeVar("Item")

Listed = Annotated[tuple[Item, ...], Strict(False)]
"""A list of a recipe, kept as a tuple; its items are as strict as any key."""
Count = Annotated[int, Field(gt=0, le=10**9)]
"""Of samples, tokens, rows, steps."""
CountFromZero = Annotated[int, Field(ge=0, le=10**9)]
Batch = Annotated[int, Field(gt=0, le=2**16)]
"""Sequences or rows that are held side by side."""
Processes = Annotated[int, Field(gt=0, le=1024)]
"""Or threads, of one machine."""
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Bytes = Annotated[int, Field(gt=0, le=2**50)]
GIB = 2**30
"""Bytes in a GiB."""
LOWEST_TEMPERATURE = 0.001
"""Log-probabilities are divided by a temperature: with less they lose what precision they have, or are no numbers."""
Seconds = Annotated[float, Field(ge=0.001, le=1e6)]
"""A limit; 1e6 are eleven days, and less than what operating systems can wait for."""


def has_numbers_of_json(values: dict[str, Any]) -> dict[str, Any]:
    """`values`, whose numbers JSON and MessagePack can hold.

    Raises:
        ValueError: one of them is not finite, or takes more than 64 bits.
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
"""For something that is not Tailrace's, whatever they are called."""


def _is_device(text: str) -> str:
    if not re.fullmatch(r"cpu|mps|(cuda|xpu)(:\d{1,3})?", text):
        raise ValueError(f"is {quoted(text)}; expected cpu, cuda, cuda:N, xpu, xpu:N or mps")
    return text


Device = Annotated[str, AfterValidator(_is_device)]


def expanded(path: str) -> str:
    """A path as a shell would have it: `~` and `~user` are home directories.

    Raises:
        ValueError: it is a URL, there is no such user, it begins with a variable, or no file can have it as its name.
    """
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path):  # which is not shown: it may hold a password
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
    """A path that is expanded already, as a key of a recipe has it: `./` keeps it from being expanded once more.

    `Path` leaves that out of what it is made of.
    """
    return f"./{path}" if str(path).startswith(("~", "$")) else str(path)


PathText = Annotated[str, Field(min_length=1), AfterValidator(expanded)]
"""Of a file or a directory; a relative one starts at the working directory. `expanded`."""


class Config(BaseModel):
    """Frozen, keyword-only; unknown keys are errors; the docstring under a field is its description.

    A value has the type of its key already: `true`, `1.0` and `"1"` are no integers. An integer is a number, too.
    """

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    _references: dict[tuple[int | str, ...], str] = PrivateAttr(default_factory=dict)

    @property
    def references(self) -> Mapping[tuple[int | str, ...], str]:
        """The `${…}` that stand in the recipe for texts from the environment, by the places of those texts."""
        return self._references

    def with_references(self, references: Mapping[tuple[int | str, ...], str]) -> Self:
        """A copy of this configuration whose `references` are these."""
        copy = self.model_copy()
        copy._references = dict(references)
        return copy

    @classmethod
    def part_of_training(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """What this schema takes of the recipe of a training run. `values` has only the keys that both schemas have."""
        return dict(values)

    @classmethod
    def default_type(cls, section: str, values: Mapping[str, Any]) -> str | None:
        """The `type` of a section that names none in `values`; None where it may be left out, or must name one."""
        field = cls.model_fields[section]
        return getattr(field.default, "type", None) if field.discriminator else None


def is_slow_in_bfloat16(values: Any) -> bool:
    """Whether what a configuration is made of says that it computes on this machine, on a CPU that is slow in that.

    What the machines of a cluster are like is not known.
    """
    if not isinstance(values, dict) or str(values.get("device", "cpu")).partition(":")[0] != "cpu":
        return False
    return key_of(values.get("cluster"), "address", None) is None and not multiplies_bfloat16()


def with_default(section: Any, key: str, value: Any) -> Any:
    """A section, as a mapping or made already, with another default of one key."""
    if isinstance(section, dict):
        return {key: value, **section}
    if isinstance(section, Config) and key not in section.model_fields_set:
        return section.model_copy(update={key: value})
    return section


def key_of(section: Any, key: str, default: Any) -> Any:
    """A key of a section, which is a mapping, or made already, or missing."""
    return section.get(key, default) if isinstance(section, dict) else getattr(section, key, default)
