"""Holding a claim for as long as its work takes.

A claim can become void meanwhile: its rows are lost with a storage unit and will be put again, or its lease ended and
they are somebody else's. What was worked out for them then counts for nothing.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from tailrace.errors import LeaseError, PeerLost, StaleRowError
from tailrace.transfer.queue.base import Claim, RowId, TransferQueue
from tailrace.types import Value

VOID = {"void": True}
"""In the `info` of an event: what was done counts for nothing, because the claim was void."""


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


async def ack_if_held(queue: TransferQueue, claim: Claim, outputs: Mapping[RowId, Mapping[str, Value]]) -> bool:
    """Ack; False where nothing was acked because a row is not under this lease any more, or gone.

    Raises:
        ColumnError: see `TransferQueue.ack`.
    """
    try:
        await queue.ack(claim, outputs)
    except (LeaseError, StaleRowError):
        return False
    return True


async def _renew(queue: TransferQueue, claim: Claim, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        try:
            await queue.renew(claim)
        except PeerLost:
            continue  # the controller may be back in time; if not, the ack will say so
        except LeaseError:
            return  # all rows were acked; or the lease expired all the same, and the ack will say so
