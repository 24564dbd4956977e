"""What a medium does: it brings the chunks of one version from one parent into the memory of this process.

    receiver ──place──▶ medium ──▶ memory      bring ──▶ errand.ask … ──▶ verified ──▶ errand.arrived, errand.corrupt

Everything is called in the receiver's thread, and nothing waits.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeAlias

from tailrace.errors import TailraceError, WeightsError
from tailrace.transfer.weights.messages import AnswerOrError, ManifestReply, WeightsQuestion
from tailrace.transfer.weights.segments import Segment
from tailrace.transfer.weights.versions import Manifest, StoredVersion

Placed: TypeAlias = Callable[[Segment | WeightsError], None]
"""Told of the memory for a payload, or why there is none."""


class Errand(Protocol):
    """The version that is fetched, as a medium sees it."""

    def ask(self, question: WeightsQuestion, then: Callable[[AnswerOrError], None]) -> None:
        """Ask the parent. `then` is called unless the parent is lost, has the version no more, or was left."""

    def take(self, manifest: Manifest, then: Placed) -> None:
        """Find memory of this process's own. `then` is called unless the parent was left."""

    def attach(self, path: Path, manifest: Manifest, then: Placed) -> None:
        """Find memory of another process on this host with this version, held. `then`: as of `take`."""

    def arrived(self, chunk: int, value: bytes, *, nbytes: int) -> None:
        """A chunk is in place, and has this sum; `nbytes` of it came over the network."""

    def corrupt(self, chunk: int, error: TailraceError | None = None) -> bool:
        """A chunk has not the sum that it must have, or `error` came in its place; whether to fetch it again."""

    @property
    def retry_s(self) -> float:
        """Seconds after which a question without an answer is asked again."""


class Medium(ABC):
    """From one parent."""

    def __init__(self, errand: Errand) -> None:
        """Nothing is asked yet."""
        self._errand = errand

    @abstractmethod
    def place(self, manifest: Manifest, described: ManifestReply, then: Placed) -> None:
        """Find a place for the payload; it may take a while."""

    @abstractmethod
    def bring(self, stored: StoredVersion) -> None:
        """Begin to bring the chunks that are lacking."""
