"""Chooses a medium."""

from typing import Literal, TypeAlias

from tailrace.transfer.weights.media.base import Errand, Medium
from tailrace.transfer.weights.media.shared_memory import SharedMemoryMedium
from tailrace.transfer.weights.media.tcp import TcpMedium

MediumName: TypeAlias = Literal["auto", "shared_memory", "tcp"]


def make_medium(name: MediumName, errand: Errand, *, same_host: bool) -> Medium:
    """The medium for a parent. `same_host`: memory can be shared with it."""
    if name == "shared_memory" or (name == "auto" and same_host):
        return SharedMemoryMedium(errand)
    return TcpMedium(errand)
