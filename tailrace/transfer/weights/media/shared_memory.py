"""The parent's own memory, on the same host: nothing is copied.

parent writes ──▶ tells how many chunks are there, and their sums ──▶ this reads them in place, to verify them

It asks for half of what is lacking each time: each message stops the thread that writes, and after few of them little
is left to verify when the last chunk is written.
"""

from collections.abc import Iterator
from functools import partial

from tailrace.transfer.weights.media.base import Arrival, ChunkRequest, Medium
from tailrace.transfer.weights.messages import SUM_BYTES, AnswerOrError, GetSums, SumsReply
from tailrace.transfer.weights.versions import packed_sums, sum_of

_LAST = 4
"""What is still to be verified when the last chunk is written: this part of a version."""


class SharedMemoryMedium(Medium):
    """Verifies what the parent has written. One question is under way at a time."""

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
