"""Waiting for a claim for as long as it takes, and holding it for as long as its work takes.

A claim can become void meanwhile: its rows are lost with a storage unit and will be put again, or its lease ended and
they are somebody else's. What was worked out for them then counts for nothing.
"""

import asyncio
import warnings
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress

from tailrace.errors import LeaseError, PeerLost, QueueClosed, QueueTimeout, StaleRowError, TailraceWarning
from tailrace.transfer.queue.base import Claim, RowId, TransferQueue
from tailrace.types import Value

VOID = {"void": True}
"""In the `info` of an event: what was done counts for nothing, because the claim was void."""


async def next_claim(queue: TransferQueue, task: str, *, limit: int | None = None) -> Claim | None:
    """The next claim of a worker that serves until the queue is closed; None when it is. `limit`: see `claim`.

    However long there is none: a worker without work is no error. Whoever waits for what comes of it has a limit.

    Raises:
        QueueError: see `TransferQueue.claim`.
        PeerLost: the queue is gone.
    """
    while True:
        try:
            return await queue.claim(task, limit=limit)
        except QueueTimeout:
            continue
        except QueueClosed:
            return None


@asynccontextmanager
async def held(queue: TransferQueue, claim: Claim) -> AsyncIterator[Claim]:
    """Renew the lease of `claim` while the block runs; at its end, however it ends, give back what was not acked."""
    async with holding(queue) as hold:
        hold(claim)
        yield claim


@asynccontextmanager
async def holding(queue: TransferQueue) -> AsyncIterator[Callable[[Claim], None]]:
    """`held` for any number of claims: those that the block calls what it gets with, each from then on.

    A third of the lease passes between renewals.
    """
    heartbeats: dict[asyncio.Task[None], Claim] = {}

    def hold(claim: Claim) -> None:
        heartbeats[asyncio.create_task(_renew(queue, claim, claim.lease_s / 3))] = claim

    try:
        yield hold
    finally:
        for heartbeat in heartbeats:
            heartbeat.cancel()
        await give_back(queue, heartbeats.values())
        if heartbeats:  # not awaited themselves: to suppress their cancellation would suppress the caller's
            await asyncio.wait(heartbeats)
    for heartbeat in heartbeats:
        if not heartbeat.cancelled():
            heartbeat.result()  # an error that nobody foresaw, which the block has not met itself


async def give_back(queue: TransferQueue, claims: Iterable[Claim]) -> None:
    """Make ready again what was not acked, of all claims at once: a queue that does not answer costs one limit."""
    await asyncio.gather(*(_give_back(queue, claim) for claim in claims))


async def ack_if_held(queue: TransferQueue, claim: Claim, outputs: Mapping[RowId, Mapping[str, Value]]) -> bool:
    """Ack; False where nothing was acked because a row is not under this lease any more, or gone.

    Raises:
        ColumnError: see `TransferQueue.ack`.
    """
    try:
        await queue.ack(claim, outputs)
    except StaleRowError:
        return False
    except LeaseError:
        warnings.warn(
            f"work on a claim of task {claim.task!r} took longer than its lease, which was not renewed in time; it is "
            f"done anew, by whoever claims it. If this comes again, raise queue.lease_s (now {claim.lease_s:g} s) or "
            f"queue.client_limit_s",
            TailraceWarning,
            stacklevel=2,
        )
        return False
    return True


async def _give_back(queue: TransferQueue, claim: Claim) -> None:
    with suppress(PeerLost):  # the queue, if it comes back, ends the lease by itself
        await queue.nack(claim)


async def _renew(queue: TransferQueue, claim: Claim, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        try:
            await queue.renew(claim)
        except PeerLost:
            continue  # the controller may be back in time; if not, the ack will say so
        except LeaseError:
            return  # all rows were acked; or the lease expired all the same, and the ack will say so
