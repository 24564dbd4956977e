"""Reads the parent's own memory on the same host: nothing is copied.

parent writes ──▶ sends the sums of the chunks that are there ──▶ the receiver verifies the chunks in place

Each question is for half of the missing chunks, since each message stops the thread that writes. After few messages,
little is left to verify when the last chunk is written.
"""

from collections.abc import Iterator
from functools import partial

from tailrace.transfer.weights.media.base import Arrival, ChunkRequest, Medium
from tailrace.transfer.weights.messages import SUM_BYTES, AnswerOrError, GetSums, SumsReply
from tailrace.transfer.weights.versions import packed_sums, sum_of

_LAST = 4
"""One part in so many of a version is still to be verified when the last chunk is written."""


class SharedMemoryMedium(Medium):
    """Verifies the chunks that the parent has written. One question is under way at a time."""

    def requests(self) -> Iterator[ChunkRequest]:
        """See `Medium.requests`."""
        stored, chunks = self._stored, self._stored.manifest.chunks
        if not stored.whole:
            lacking = chunks - stored.ready
            want = min(chunks, stored.ready + max(lacking // 2, -(-chunks // _LAST)))
            yield ChunkRequest(GetSums(stored.manifest.serial, stored.ready, want), partial(self._verify, stored.ready))

    def _verify(self, start: int, answer: AnswerOrError) -> Iterator[Arrival]:
        manifest, memory = self._stored.manifest, self._stored.memory
        match answer:
            case (SumsReply(sums), _) if len(sums) % SUM_BYTES == 0:
                for chunk, value in enumerate(packed_sums(sums)[: manifest.chunks - start], start):
                    yield Arrival(chunk, value if sum_of(memory[manifest.span(chunk)]) == value else None)
            case _:
                yield Arrival(start, None)
