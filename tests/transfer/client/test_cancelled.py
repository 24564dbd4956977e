"""An operation that a client cancels happens whole or not at all, and leaves nothing behind."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tailrace.errors import GroupExists, LeaseError, QueueClosed, QueueTimeout
from tailrace.transfer.queue.client.remote import RemoteQueue
from tailrace.transfer.queue.policies.first_in import FirstIn
from tailrace.transfer.queue.rows.table import QueueTask
from tailrace.types import TaskSpec
from tests.transfer.client.servers import LIMIT_S, Served, serving
from tests.transfer.tables import group, outputs, tokens

SMALL, LARGE = 3, 20_000
"""Tokens of cells that the controller writes, and of cells that pass through shared memory."""
SIZE = 2
MOMENTS = [0, *sorted({int(1.3**power) for power in range(28)})]
"""The turns of the event loop before an operation is cancelled. After the last, it has mostly ended."""

Doomed = Callable[[], Coroutine[Any, Any, Any]]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    tasks = (QueueTask(TaskSpec(name="only", reads=("prompt_ids",), writes=("response_ids",)), FirstIn(9)),)
    with serving(tmp_path, units=2, tasks=tasks, replicas=2, lease_s=1000.0) as running:
        yield running


async def give_up(operation: Doomed, turns: int) -> asyncio.Task[Any]:
    """Begin `operation`, and cancel it after `turns` turns of the loop. It may have ended by then."""
    task = asyncio.create_task(operation())
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    return task


async def consume(queue: RemoteQueue, number: int) -> None:
    """Claim and ack the rows of group `number`, the only one in the queue."""
    claim = await queue.claim("only", timeout=LIMIT_S)
    assert [row.group_id for row in claim.rows] == [number] * SIZE
    await queue.ack(claim, outputs(claim, response_ids=tokens(1)))
    assert (await queue.stats()).rows == 0


@pytest.mark.parametrize("prompt", [SMALL, LARGE])
async def test_a_put_is_in_as_a_whole_or_may_come_again(served: Served, prompt: int) -> None:
    async with asyncio.timeout(LIMIT_S), RemoteQueue(served.address, name="tester") as queue:
        for number, turns in enumerate(MOMENTS):
            rows = group(number, SIZE, prompt=prompt)
            await give_up(lambda rows=rows: queue.put(rows), turns)  # type: ignore[misc]
            with suppress(GroupExists):
                await queue.put(rows, timeout=LIMIT_S)
            await consume(queue, number)


@pytest.mark.parametrize("prompt", [SMALL, LARGE])
async def test_a_claim_whose_answer_nobody_has_gives_its_rows_back(served: Served, prompt: int) -> None:
    async with asyncio.timeout(LIMIT_S), RemoteQueue(served.address, name="tester") as queue:
        for number, turns in enumerate(MOMENTS):
            await queue.put(group(number, SIZE, prompt=prompt))
            task = await give_up(lambda: queue.claim("only"), turns)
            if not task.cancelled():
                await queue.nack(task.result())
            await consume(queue, number)
        assert (await queue.stats()).tasks["only"].expired == 0


async def test_an_ack_consumes_all_rows_or_none(served: Served) -> None:
    async with asyncio.timeout(LIMIT_S), RemoteQueue(served.address, name="tester") as queue:
        consumed = 0
        for number, turns in enumerate(MOMENTS):
            await queue.put(group(number, SIZE))
            claim = await queue.claim("only")
            cells = outputs(claim, response_ids=tokens(LARGE))
            await give_up(lambda claim=claim, cells=cells: queue.ack(claim, cells), turns)  # type: ignore[misc]
            with suppress(LeaseError):
                await queue.nack(claim)
            counts = (await queue.stats()).tasks["only"]
            assert (counts.leased, counts.consumed - consumed) in ((0, 0), (0, SIZE))
            if counts.ready:
                await consume(queue, number)
            consumed += SIZE


async def test_a_snapshot_keeps_nothing_that_has_left(served: Served) -> None:
    async with asyncio.timeout(LIMIT_S), RemoteQueue(served.address, name="tester") as queue:
        for number, turns in enumerate(MOMENTS):
            await queue.put(group(number, SIZE, prompt=LARGE))
            await give_up(queue.snapshot, turns)
            await consume(queue, number)
        while any(storage.nbytes for storage in served.storages):
            await queue.stats()  # each request takes along what is due


async def test_a_queue_that_somebody_began_to_close_is_open_or_closed(served: Served) -> None:
    async with asyncio.timeout(LIMIT_S), RemoteQueue(served.address, name="tester") as queue:
        for turns in MOMENTS:
            await give_up(queue.close, turns)
            with pytest.raises(QueueClosed if (await queue.stats()).closed else QueueTimeout):
                await queue.claim("only", timeout=0)
        assert (await queue.stats()).closed, "after the last moment"
