"""Holding a claim for as long as its work takes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from tailrace.transfer.queue.base import Claim, TransferQueue


@asynccontextmanager
async def held(queue: TransferQueue, claim: Claim, *, lease_s: float) -> AsyncIterator[Claim]:
    """Renew the lease of `claim` while the block runs; if it raises, give back the rows that were not acked.

    `lease_s`: seconds of the queue's leases; a third of it passes between renewals.
    """
    heartbeat = asyncio.create_task(_renew(queue, claim, lease_s / 3))
    try:
        yield claim
    except BaseException:
        await queue.nack(claim)
        raise
    finally:
        heartbeat.cancel()
        with suppress(asyncio.CancelledError):
            await heartbeat


async def _renew(queue: TransferQueue, claim: Claim, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        await queue.renew(claim)
