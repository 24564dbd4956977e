"""The streaming data loader, over which a task iterates (AsyncFlow, section 3.4)."""

from typing import Self

from tailrace.transfer.queue.base import Claim, TransferQueue


class StreamingLoader:
    """Yields claims of one task until `rows` rows have been claimed in all; iterate over it once.

        async for claim in StreamingLoader(queue, "actor", rows=32):
            ...
            await queue.ack(claim, outputs)

    Each claim is made when the loop asks for it, limited to the rows that are still wanted, so no more than `rows` are
    claimed. The caller must ack or nack every claim. If an exception leaves the loop, the caller must nack the claims
    that are not acked yet, or their rows go back when the leases expire.

    Iterating raises the errors of `TransferQueue.claim`.
    """

    def __init__(
        self, queue: TransferQueue, task: str, *, rows: int, rank: int | None = None, timeout: float | None = None
    ) -> None:
        """`rank`: see `TransferQueue.claim`; `rows` then counts the rows of that rank.

        `timeout`: seconds that each claim may wait; the queue's own limit by default.
        """
        self._queue = queue
        self._task = task
        self._wanted = rows
        self._rank = rank
        self._timeout = timeout

    def __aiter__(self) -> Self:
        """Return the loader itself."""
        return self

    def claim_more(self, rows: int) -> None:
        """Claim `rows` rows more, for as many that turned out not to count. It may be called inside the loop."""
        self._wanted += rows

    async def __anext__(self) -> Claim:
        """Wait for the next claim."""
        if self._wanted <= 0:
            raise StopAsyncIteration
        claim = await self._queue.claim(self._task, limit=self._wanted, rank=self._rank, timeout=self._timeout)
        self._wanted -= len(claim.rows)
        return claim
