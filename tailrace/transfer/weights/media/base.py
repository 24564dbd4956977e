"""What a medium does: it fetches the chunks that a stored version lacks, from one parent.

    Medium.requests ──▶ Download asks the parent ──answer──▶ ChunkRequest.read ──Arrival──▶ Download

A medium decides what to ask and verifies what comes; it sends nothing and waits for nothing. Everything is called in
the receiver's thread.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tailrace.transfer.weights.messages import AnswerOrError, WeightsQuestion
from tailrace.transfer.weights.versions import StoredVersion


class Arrival(NamedTuple):
    """What an answer says of one chunk."""

    chunk: int
    sum: bytes | None
    """The sum of its bytes, which are in their place; None where they did not come, or have not the sum they must."""
    nbytes: int = 0
    """Bytes of it that came over the network."""


class ChunkRequest(NamedTuple):
    """A question to the parent, and how to take in its answer."""

    question: WeightsQuestion
    read: Callable[[AnswerOrError], Iterator[Arrival]]
    """Verifies chunk by chunk as it is iterated. Whoever gets an arrival without a sum stops there."""


class Medium(ABC):
    """Fetches from one parent. What has no sum is asked for again by the next `requests`."""

    def __init__(self, stored: StoredVersion) -> None:
        """Nothing is asked yet. `stored` lacks the chunks that have no sum."""
        self._stored = stored

    @abstractmethod
    def requests(self) -> Iterator[ChunkRequest]:
        """Yield what to ask now, at the beginning and after each answer; nothing while enough is under way."""
