"""Chunks as messages, over ZeroMQ: to other hosts, and where memory cannot be shared.

A few are asked for at once, so that the link is never idle; few enough that none waits so long that it would be asked
for again while it is on its way.
"""

import time
from collections import deque

from tailrace.transfer.weights.media.base import Errand, Medium, Placed
from tailrace.transfer.weights.messages import Chunk, Described, Fetch, Heard, error_in
from tailrace.transfer.weights.versions import Holding, Manifest, sum_of

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

    def place(self, manifest: Manifest, described: Described, then: Placed) -> None:
        """See `Medium.place`."""
        self._errand.take(manifest, then)

    def bring(self, holding: Holding) -> None:
        """See `Medium.bring`."""
        self._lacking.extend(chunk for chunk in range(holding.manifest.chunks) if holding.sum(chunk) is None)
        self._fill(holding)

    def _fill(self, holding: Holding) -> None:
        while self._lacking and self._under_way < self._window:
            self._fetch(holding, self._lacking.popleft())

    def _fetch(self, holding: Holding, chunk: int) -> None:
        asked = time.monotonic()
        self._under_way += 1

        def heard(what: Heard) -> None:
            self._under_way -= 1
            self._adapt(time.monotonic() - asked)
            if self._keep(holding, chunk, what):
                self._fill(holding)

        self._errand.ask(Fetch(holding.manifest.serial, chunk), heard)

    def _adapt(self, waited_s: float) -> None:
        if waited_s > self._errand.retry_s / 2:
            self._window = max(1, self._window - 1)
        elif waited_s < self._errand.retry_s / 4:
            self._window = min(_WINDOW, self._window + 1)

    def _keep(self, holding: Holding, chunk: int, what: Heard) -> bool:
        """Whether to go on."""
        room = holding.memory[holding.manifest.span(chunk)]
        match what:
            case (Chunk(value), frame) if frame is not None and len(frame) == len(room) and sum_of(frame) == value:
                room[:] = frame
                self._errand.arrived(chunk, value, nbytes=len(frame))
                return True
        self._lacking.appendleft(chunk)
        return self._errand.corrupt(chunk, error_in(what))
