"""The state of a receiver that its threads share: its own thread, which fetches weights, and those that use them."""

from collections import Counter
from dataclasses import dataclass, field

from tailrace.errors import WeightsError
from tailrace.transfer.weights.messages import NO_VERSION
from tailrace.transfer.weights.versions import StoredVersion


@dataclass(slots=True)
class ReceiverStatus:
    """All fields that more than one thread reads or writes. They are reached through a `Guarded` alone.

    The receiver's thread writes all of them except two. A thread that uses the weights writes `installed`. Each thread
    that reads a version counts itself in `readers`.
    """

    received: StoredVersion | None = None
    """The newest version that is wholly here."""
    readers: Counter[int] = field(default_factory=Counter)
    """The number of threads that read a version now, by its serial."""
    error: WeightsError | None = None
    """The reason why weights do not come at the moment."""
    refusal: tuple[int, WeightsError] | None = None
    """The newest version and the reason, if it was given up."""
    announced: int = NO_VERSION
    installed: int = NO_VERSION
    parent: str | None = None
    """See `ReceiverStats.parent`."""
    nbytes: int = 0
    """Bytes of weights that came over the network."""
    bytes_broadcast: int = 0
    """The part of `nbytes` that came by broadcasts."""
    turns: set[str] = field(default_factory=set)
    """The turns to install that this receiver has now."""
