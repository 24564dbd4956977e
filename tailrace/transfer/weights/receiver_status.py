"""What threads share of a receiver: its own, which fetches weights, and those that use them."""

from collections import Counter
from dataclasses import dataclass, field

from tailrace.errors import WeightsError
from tailrace.transfer.weights.messages import NO_VERSION
from tailrace.transfer.weights.versions import StoredVersion


@dataclass(slots=True)
class ReceiverStatus:
    """Every field that more than one thread reads or writes. It is reached through a `Guarded` alone.

    The receiver's thread writes all of it, but for `installed`, which a thread that uses the weights writes, and
    `readers`, which each thread that reads a version counts.
    """

    received: StoredVersion | None = None
    """The newest version that is wholly here."""
    readers: Counter[int] = field(default_factory=Counter)
    """How many threads read a version now, by its serial."""
    error: WeightsError | None = None
    """Why weights do not come at the moment."""
    refusal: tuple[int, WeightsError] | None = None
    """The newest version, if it was given up, and why."""
    announced: int = NO_VERSION
    installed: int = NO_VERSION
    parent: str | None = None
    """See `ReceiverStats.parent`."""
    nbytes: int = 0
    """Bytes of weights that came over the network."""
    bytes_broadcast: int = 0
    """Bytes of these that came by broadcasts."""
    turns: set[str] = field(default_factory=set)
    """The turns to install that this receiver has."""
