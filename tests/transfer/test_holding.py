import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tailrace.config.transfer import LocalQueueConfig
from tailrace.errors import LeaseError, PeerLost, TailraceWarning
from tailrace.transfer.queue.base import Claim, RowId, TransferQueue
from tailrace.transfer.queue.holding import ack_if_held, held, next_claim
from tailrace.transfer.queue.local.queue import LocalQueue
from tailrace.transfer.queue.policies.first_in import FirstIn
from tests.transfer.tables import group, one_task, outputs, queue_of
from tests.transfer.virtual_time import settle, virtual_time

LEASE_S = 6.0


async def ack_then_claim_again(queue: TransferQueue, claim: Claim) -> None:
    async with held(queue, claim):
        await asyncio.sleep(0)
        await queue.ack(claim, outputs(claim))
    await queue.claim(claim.task)


@virtual_time
async def test_who_serves_until_the_queue_is_closed_waits_longer_than_the_limit_of_a_claim() -> None:
    queue = queue_of(one_task(FirstIn(2)), timeout_s=5.0)
    waiting = asyncio.create_task(next_claim(queue, "only", limit=1))
    await asyncio.sleep(1000.0)
    await queue.put(group(0, 1))
    claim = await waiting
    assert claim is not None
    await queue.ack(claim, outputs(claim))
    waiting = asyncio.create_task(next_claim(queue, "only"))
    await asyncio.sleep(1000.0)
    await queue.close()
    assert await waiting is None


@virtual_time
async def test_work_longer_than_the_lease_keeps_its_rows() -> None:
    queue = queue_of(one_task(FirstIn(2)), lease_s=LEASE_S)
    await queue.put(group(0, 2))
    async with held(queue, await queue.claim("only")) as claim:
        await asyncio.sleep(10 * LEASE_S)
        await queue.ack(claim, outputs(claim))
    assert (await queue.stats()).tasks["only"].consumed == 2
    assert (await queue.stats()).tasks["only"].expired == 0


@virtual_time
async def test_work_on_a_lease_that_has_ended_is_warned_of_and_not_acked() -> None:
    queue = queue_of(one_task(FirstIn(2)), lease_s=LEASE_S)
    await queue.put(group(0, 2))
    claim = await queue.claim("only")
    await asyncio.sleep(2 * LEASE_S)
    with pytest.warns(TailraceWarning, match=r"task 'only' took longer than its lease, .* raise queue\.lease_s"):
        assert not await ack_if_held(queue, claim, outputs(claim))
    assert (await queue.stats()).tasks["only"].consumed == 0


@virtual_time
async def test_work_may_go_on_after_its_last_row_was_acked() -> None:
    queue = queue_of(one_task(FirstIn(2)), lease_s=LEASE_S)
    await queue.put(group(0, 2))
    async with held(queue, await queue.claim("only")) as claim:
        await queue.ack(claim, outputs(claim))
        await asyncio.sleep(10 * LEASE_S)


@virtual_time
async def test_rows_that_were_not_acked_go_back_at_once_however_the_work_ends() -> None:
    queue = queue_of(one_task(FirstIn(2)), lease_s=LEASE_S)
    await queue.put(group(0, 2))
    with pytest.raises(ZeroDivisionError):
        async with held(queue, await queue.claim("only")):
            raise ZeroDivisionError
    assert (await queue.stats()).tasks["only"].ready == 2
    async with held(queue, await queue.claim("only")):
        pass
    assert (await queue.stats()).tasks["only"].ready == 2


class Lost(LocalQueue):
    async def nack(self, claim: Claim, rows: Sequence[RowId] | None = None) -> None:
        raise PeerLost("no answer")


@virtual_time
async def test_a_queue_that_is_lost_at_the_end_does_not_hide_how_the_work_ended() -> None:
    queue = Lost(one_task(FirstIn(2)), LocalQueueConfig())
    await queue.put(group(0, 2))
    with pytest.raises(ZeroDivisionError):
        async with held(queue, await queue.claim("only")):
            raise ZeroDivisionError


@virtual_time
async def test_a_lease_lost_meanwhile_is_the_error_of_the_ack() -> None:
    queue = queue_of(one_task(FirstIn(2)), lease_s=LEASE_S)
    await queue.put(group(0, 2))
    claim = await queue.claim("only")
    async with held(queue, replace(claim, lease_s=10 * LEASE_S)):  # so that the lease is renewed too late
        await asyncio.sleep(5 * LEASE_S)
        with pytest.raises(LeaseError, match="not under lease"):
            await queue.ack(claim, outputs(claim))
        await asyncio.sleep(5 * LEASE_S)
    assert (await queue.stats()).tasks["only"].ready == 2


@virtual_time
async def test_a_cancellation_at_the_very_end_of_the_work_is_not_swallowed() -> None:
    """A worker that lost the cancellation would claim again, and its task group would wait for ever."""
    for turns in range(12):
        queue = queue_of(one_task(FirstIn(2)), lease_s=LEASE_S)
        await queue.put(group(0, 2))
        claim = await queue.claim("only")
        worker = asyncio.create_task(ack_then_claim_again(queue, claim))
        for _ in range(turns):
            await asyncio.sleep(0)
        worker.cancel()
        await settle()
        assert worker.cancelled(), turns
