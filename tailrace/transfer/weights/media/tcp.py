"""Chunks as messages over ZeroMQ: to other hosts, and where memory cannot be shared.

A few chunks are asked for at once, so that the link is never idle. They are so few that none is asked for again while
it is on its way.
"""

import time
from collections import deque
from collections.abc import Iterator
from functools import partial

from tailrace.transfer.weights.media.base import Arrival, ChunkRequest, Medium
from tailrace.transfer.weights.messages import AnswerOrError, ChunkReply, GetChunk
from tailrace.transfer.weights.versions import StoredVersion, sum_of

_WINDOW = 8
"""The most chunks that are asked for at once."""


class TcpMedium(Medium):
    """Copies the chunks that the parent sends into memory of this process."""

    def __init__(self, stored: StoredVersion, *, retry_s: float) -> None:
        """See `Medium`. `retry_s`: seconds after which an unanswered question is asked again."""
        super().__init__(stored)
        self._retry_s = retry_s
        self._window = 2
        self._under_way = 0
        self._lacking = deque(chunk for chunk in range(stored.manifest.chunks) if stored.sum(chunk) is None)

    def requests(self) -> Iterator[ChunkRequest]:
        """See `Medium.requests`."""
        while self._lacking and self._under_way < self._window:
            self._under_way += 1
            chunk = self._lacking.popleft()
            question = GetChunk(self._stored.manifest.serial, chunk)
            yield ChunkRequest(question, partial(self._read, chunk, time.monotonic()))

    def _read(self, chunk: int, asked: float, answer: AnswerOrError) -> Iterator[Arrival]:
        self._under_way -= 1
        self._adapt(time.monotonic() - asked)
        room = self._stored.memory[self._stored.manifest.span(chunk)]
        match answer:
            case (ChunkReply(value), frame) if frame is not None and len(frame) == len(room) and sum_of(frame) == value:
                room[:] = frame
                yield Arrival(chunk, value, len(frame))
            case _:
                self._lacking.appendleft(chunk)
                yield Arrival(chunk, None)

    def _adapt(self, waited_s: float) -> None:
        if waited_s > self._retry_s / 2:
            self._window = max(1, self._window - 1)
        elif waited_s < self._retry_s / 4:
            self._window = min(_WINDOW, self._window + 1)
