"""Whether a queue needs another storage unit, or one less."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

FULL = 0.8
"""The part of the units' room in use from which another unit is started, even if no put waits yet."""
EMPTY = 0.4
"""The part of the room of one unit less that may be in use when a unit leaves. Beyond it, another one is started where
puts wait: a large put may not fit into units that are half empty."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What a storage unit has."""

    bytes: int
    max_bytes: int


def wanted(units: Sequence[Stored], *, puts_wait: bool, least: int, most: int) -> Literal["add", "release", "hold"]:
    """Decide about the number of units.

    Args:
        units: those that rows are written to. The last is the one that would leave.
        puts_wait: whether producers wait for room, for whatever reason.
        least, most: bounds of their number.
    """
    used = sum(unit.bytes for unit in units)
    room = sum(unit.max_bytes for unit in units)
    if len(units) < most and (used >= FULL * room or (puts_wait and used > EMPTY * room)):
        return "add"
    if len(units) > least and used <= EMPTY * sum(unit.max_bytes for unit in units[:-1]):
        return "release"
    return "hold"
