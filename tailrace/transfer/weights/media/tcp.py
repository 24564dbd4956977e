"""Chunks as messages, over ZeroMQ: to other hosts, and where memory cannot be shared.

A few are asked for at once, so that the link is never idle; few enough that none waits so long that it would be asked
for again while it is on its way.
"""

import time
from collections import deque

from tailrace.transfer.weights.media.base import Errand, Medium, Placed
from tailrace.transfer.weights.messages import AnswerOrError, ChunkReply, GetChunk, ManifestReply, error_in
from tailrace.transfer.weights.versions import Manifest, StoredVersion, sum_of

_WINDOW = 8
"""At most so many chunks are asked for at once."""


class TcpMedium(Medium):
    """Copies what the parent sends into memory of this process."""

    def __init__(self, errand: Errand) -> None:
        """See `Medium`."""
        super().__init__(errand)
        self._window = 2
        self._under_way = 0
        self._lacking: deque[int] = deque()

    def place(self, manifest: Manifest, described: ManifestReply, then: Placed) -> None:
        """See `Medium.place`."""
        self._errand.take(manifest, then)

    def bring(self, stored: StoredVersion) -> None:
        """See `Medium.bring`."""
        self._lacking.extend(chunk for chunk in range(stored.manifest.chunks) if stored.sum(chunk) is None)
        self._fill(stored)

    def _fill(self, stored: StoredVersion) -> None:
        while self._lacking and self._under_way < self._window:
            self._fetch(stored, self._lacking.popleft())

    def _fetch(self, stored: StoredVersion, chunk: int) -> None:
        asked = time.monotonic()
        self._under_way += 1

        def heard(what: AnswerOrError) -> None:
            self._under_way -= 1
            self._adapt(time.monotonic() - asked)
            if self._keep(stored, chunk, what):
                self._fill(stored)

        self._errand.ask(GetChunk(stored.manifest.serial, chunk), heard)

    def _adapt(self, waited_s: float) -> None:
        if waited_s > self._errand.retry_s / 2:
            self._window = max(1, self._window - 1)
        elif waited_s < self._errand.retry_s / 4:
            self._window = min(_WINDOW, self._window + 1)

    def _keep(self, stored: StoredVersion, chunk: int, what: AnswerOrError) -> bool:
        """Whether to go on."""
        room = stored.memory[stored.manifest.span(chunk)]
        match what:
            case (ChunkReply(value), frame) if frame is not None and len(frame) == len(room) and sum_of(frame) == value:
                room[:] = frame
                self._errand.arrived(chunk, value, nbytes=len(frame))
                return True
        self._lacking.appendleft(chunk)
        return self._errand.corrupt(chunk, error_in(what))
