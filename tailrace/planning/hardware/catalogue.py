"""The kinds of devices that are known, by name."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from tailrace.config.hardware import DeviceConfig
from tailrace.config.load import parse_as
from tailrace.config.recipe_text import read_yaml
from tailrace.errors import PlanError, did_you_mean

_FILE = Path(__file__).with_name("devices.yaml")


@cache
def catalogue() -> Mapping[str, DeviceConfig]:
    """Return the kinds that ship, by name."""
    kinds = read_yaml(_FILE.read_text(encoding="utf-8"))
    return {name: parse_as(DeviceConfig, values, source=f"{_FILE}, {name}") for name, values in kinds.items()}


def find_device(name: str, own: Mapping[str, DeviceConfig] | None = None) -> tuple[str, DeviceConfig]:
    """Return a kind, and its name as it is written. Case, spaces and hyphens in `name` do not count.

    `own`: further kinds, which come before those of the catalogue.

    Raises:
        PlanError: it is not known; the message has the nearest name.
    """
    own = own or {}
    for written, device in (*own.items(), *catalogue().items()):
        if plain_name(written) == plain_name(name):
            return written, device
    known = {**catalogue(), **own}
    near = did_you_mean(name, known) or f"; known are {', '.join(known)}"
    raise PlanError(f"the device {name!r} is not known{near}; others go into a cluster file, under devices")


def device_called(name: str, own: Mapping[str, DeviceConfig] | None = None) -> tuple[str, DeviceConfig] | None:
    """Return the kind that something is called after, such as NVIDIA H100 80GB HBM3 by its driver, and the kind's name.

    The words of the kind's name stand in it; None where those of none do. Of several kinds the longest name counts.

    Args:
        own: further kinds, which come before those of the catalogue.
    """
    known = {**catalogue(), **(own or {})}
    found = [kind for kind in known if _words(kind) in _words(name)]
    return max(((kind, known[kind]) for kind in found), key=lambda one: len(one[0]), default=None)


def _words(name: str) -> str:
    """The words of a name, in lower case and between spaces."""
    return f" {re.sub(r'[^a-z0-9]+', ' ', name.lower())} "


def plain_name(name: str) -> str:
    """Return the letters and digits of a name in lower case: those by which names are compared."""
    return "".join(letter for letter in name.lower() if letter.isalnum())
