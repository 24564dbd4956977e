"""The interface of a medium, which fetches the chunks that a stored version lacks from one parent.

    Medium.requests ──▶ Download asks the parent ──answer──▶ ChunkRequest.read ──Arrival──▶ Download

A medium chooses the questions and verifies the answers; it sends nothing and waits for nothing. Everything is called
in the receiver's thread.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tailrace.transfer.weights.messages import AnswerOrError, WeightsQuestion
from tailrace.transfer.weights.versions import StoredVersion


class Arrival(NamedTuple):
    """The result for one chunk of an answer."""

    chunk: int
    sum: bytes | None
    """The sum of the chunk's bytes, which are in place; None if they did not come or have a wrong sum."""
    nbytes: int = 0
    """Bytes of the chunk that came over the network."""


class ChunkRequest(NamedTuple):
    """A question to the parent, and the function that reads the answer."""

    question: WeightsQuestion
    read: Callable[[AnswerOrError], Iterator[Arrival]]
    """Verifies chunk by chunk as it is iterated. The caller stops at an arrival without a sum."""


class Medium(ABC):
    """Fetches chunks from one parent. The next `requests` ask again for a chunk that arrived without a sum."""

    def __init__(self, stored: StoredVersion) -> None:
        """Ask nothing yet. `stored` lacks the chunks that have no sum."""
        self._stored = stored

    @abstractmethod
    def requests(self) -> Iterator[ChunkRequest]:
        """Yield the questions to ask now, at the beginning and after each answer; none while enough are under way."""
