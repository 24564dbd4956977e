"""The streaming data loader: what a task iterates over (AsyncFlow, section 3.4)."""

from typing import Self

from tailrace.transfer.queue.base import Claim, TransferQueue


class StreamingLoader:
    """Yields claims of one task until `rows` rows have been claimed in all; iterate over it once.

        async for claim in StreamingLoader(queue, "actor", rows=32):
            ...
            await queue.ack(claim, outputs)

    Each claim is made when the loop asks for it, with the rows still wanted as its limit, so none goes over `rows`.
    The caller acks or nacks every claim that it was given: where the loop is left by an exception, the claims not
    acked yet are the caller's to nack, or their rows go back when the leases expire.

    Iterating raises what `TransferQueue.claim` raises.
    """

    def __init__(
        self, queue: TransferQueue, task: str, *, rows: int, rank: int | None = None, timeout: float | None = None
    ) -> None:
        """`rank`: see `TransferQueue.claim`; `rows` are that rank's then.

        `timeout`: seconds that each claim may wait; the queue's own limit by default.
        """
        self._queue = queue
        self._task = task
        self._wanted = rows
        self._rank = rank
        self._timeout = timeout

    def __aiter__(self) -> Self:
        """The loader itself."""
        return self

    def claim_more(self, rows: int) -> None:
        """So many rows more: as many of those claimed turned out not to count. From within the loop, too."""
        self._wanted += rows

    async def __anext__(self) -> Claim:
        """Wait for the next claim."""
        if self._wanted <= 0:
            raise StopAsyncIteration
        claim = await self._queue.claim(self._task, limit=self._wanted, rank=self._rank, timeout=self._timeout)
        self._wanted -= len(claim.rows)
        return claim
