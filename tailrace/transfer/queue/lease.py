"""Holding a claim for as long as its work takes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tailrace.errors import LeaseError
from tailrace.transfer.queue.base import Claim, TransferQueue


@asynccontextmanager
async def held(queue: TransferQueue, claim: Claim) -> AsyncIterator[Claim]:
    """Renew the lease of `claim` while the block runs; at its end, however it ends, give back what was not acked.

    A third of the lease passes between renewals.
    """
    heartbeat = asyncio.create_task(_renew(queue, claim, claim.lease_s / 3))
    try:
        yield claim
    finally:
        heartbeat.cancel()
        await queue.nack(claim)
        await asyncio.wait([heartbeat])  # not awaited itself: to suppress its cancellation would suppress the caller's


async def _renew(queue: TransferQueue, claim: Claim, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        try:
            await queue.renew(claim)
        except LeaseError:
            return  # all rows were acked; or the lease expired all the same, and the ack will say so
