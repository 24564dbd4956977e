"""Helpers for workers: wait for a claim without limit, and renew it for as long as its work takes.

A claim can become void meanwhile: its rows are lost with a storage unit and will be put again, or its lease ended and
another worker may claim them. The work that was done on them is then lost.
"""

import asyncio
import warnings
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager, suppress

from tailrace.errors import LeaseError, PeerLost, QueueClosed, QueueTimeout, StaleRowError, TailraceWarning
from tailrace.transfer.queue.base import Claim, RowId, TransferQueue
from tailrace.types import Value

VOID = {"void": True}
"""The mark in the `info` of an event whose work is lost because the claim was void."""


async def next_claim(queue: TransferQueue, task: str, *, limit: int | None = None) -> Claim | None:
    """Return the next claim of a worker that serves until the queue is closed; None when it is closed.

    The wait has no limit: a worker without work is no error. The tasks that wait for the worker's outputs have limits.
    `limit`: see `TransferQueue.claim`.

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
    """Renew the lease of `claim` while the block runs. Then, even after an error, give back its unacked rows."""
    async with holding(queue) as hold:
        hold(claim)
        yield claim


@asynccontextmanager
async def holding(queue: TransferQueue) -> AsyncIterator[Callable[[Claim], None]]:
    """Hold any number of claims as `held` does. The block gets a function; it holds each claim that it is called with.

    A lease is renewed whenever a third of its time has passed.
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
        if heartbeats:  # wait, not await: suppressing their cancellation would also suppress the caller's
            await asyncio.wait(heartbeats)
    for heartbeat in heartbeats:
        if not heartbeat.cancelled():
            heartbeat.result()  # raises an unforeseen error of the renewals, which the block has not met itself


async def give_back(queue: TransferQueue, claims: Iterable[Claim]) -> None:
    """Give back the rows of all claims that were not acked, at once: a queue that does not answer costs one limit."""
    await asyncio.gather(*(_give_back(queue, claim) for claim in claims))


async def ack_if_held(queue: TransferQueue, claim: Claim, outputs: Mapping[RowId, Mapping[str, Value]]) -> bool:
    """Ack, and return True. Return False where nothing was acked because a row is gone or no longer under the lease.

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
            f"thrown away, and its rows are claimed again. If this repeats, raise queue.lease_s (now "
            f"{claim.lease_s:g} s) or queue.client_limit_s",
            TailraceWarning,
            stacklevel=2,
        )
        return False
    return True


async def remake_if_held(queue: TransferQueue, claim: Claim, groups: Collection[int], *, most: int) -> list[int]:
    """Have groups of a claim made again; see `TransferQueue.remake`. None is where the claim is void."""
    try:
        return await queue.remake(claim, groups, most=most)
    except (LeaseError, StaleRowError):
        return []  # the rows are claimed again, and the question comes up again


async def _give_back(queue: TransferQueue, claim: Claim) -> None:
    with suppress(PeerLost):  # if the queue comes back, it ends the lease by itself
        await queue.nack(claim)


async def _renew(queue: TransferQueue, claim: Claim, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        try:
            await queue.renew(claim)
        except PeerLost:
            continue  # the controller may come back in time; if not, the ack will fail
        except LeaseError:
            return  # all rows were acked; or the lease expired nevertheless, and the ack will fail
