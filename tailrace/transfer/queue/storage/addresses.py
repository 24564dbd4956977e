"""Addresses: a space, such as a file or a table, and a place in it, as one number.

Addresses of different spaces are never adjacent: each space has far fewer than 2^44 places.
"""

from typing import TypeVar

from tailrace.types import IntArray

_Numbers = TypeVar("_Numbers", int, IntArray)
_PLACE_BITS = 44
"""Places are below 2^44, and spaces below 2^19 where addresses are 64-bit integers."""


def join(space: int, place: int) -> int:
    """Return the address of a place in a space."""
    return space << _PLACE_BITS | place


def split(address: _Numbers) -> tuple[_Numbers, _Numbers]:
    """Return the space and the place of an address, or of each address in an array."""
    return address >> _PLACE_BITS, address & (1 << _PLACE_BITS) - 1
