import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest

from tailrace.config.columns import COLUMNS, ColumnKind
from tailrace.config.transfer import LocalQueueConfig
from tailrace.errors import QueueError, StaleRowError
from tailrace.transfer.queue.base import Claim, NewRow, RowId
from tailrace.transfer.queue.local.queue import LocalQueue
from tailrace.transfer.queue.policies.first_in import FirstIn
from tailrace.transfer.queue.policies.groups import WholeGroups
from tailrace.transfer.queue.rows.table import QueueTask
from tailrace.types import TaskSpec
from tests.transfer.tables import ROLLOUT, orders, outputs, queue_of, table, tokens
from tests.transfer.virtual_time import virtual_time


async def half_done() -> tuple[LocalQueue, Claim]:
    """A queue in which group 1 has passed rollout, the row of group 2 is leased, and group 0 has left."""
    queue = queue_of((QueueTask(ROLLOUT, FirstIn(2)), QueueTask(TaskSpec(name="log", reads=("seed",)), FirstIn(9))))
    for number in (0, 1, 2):
        cells: dict[str, Any] = {"prompt_ids": tokens(2 + number), "seed": number, "metadata": {"n": [number, None]}}
        await queue.put([NewRow(group_id=number, group_size=1, order=number, cells=cells)])
    log = await queue.claim("log")
    await queue.ack(log, {log.rows[0].id: {}})
    claim = await queue.claim("rollout")
    await queue.ack(claim, outputs(claim, response_ids=tokens(3)))
    await queue.claim("rollout")
    return queue, log


def fresh() -> LocalQueue:
    return queue_of((QueueTask(ROLLOUT, FirstIn(2)), QueueTask(TaskSpec(name="log", reads=("seed",)), FirstIn(9))))


@virtual_time
async def test_a_restored_queue_goes_on_where_the_snapshot_was_taken() -> None:
    queue, _ = await half_done()
    restored = fresh()
    await restored.restore(await queue.snapshot())
    before, after = await queue.stats(), await restored.stats()
    assert (after.rows, after.bytes) == (before.rows, before.bytes) == (2, (3 + 3 + 4) * 8 + 2 * 8 + 2 * 8)
    assert (after.tasks["rollout"].ready, after.tasks["rollout"].consumed) == (1, 2)
    assert (after.tasks["log"].ready, after.tasks["log"].consumed) == (2, 1)
    [row] = (await restored.claim("rollout")).rows
    np.testing.assert_array_equal(row.cells["prompt_ids"], tokens(4))
    assert orders(await restored.claim("log")) == [1, 2]


@virtual_time
async def test_an_id_from_before_a_snapshot_never_names_another_row() -> None:
    queue, log = await half_done()
    gone = log.rows[0].id
    restored = fresh()
    await restored.restore(await queue.snapshot())
    [row] = await restored.put([NewRow(group_id=9, group_size=1, order=9, cells={"prompt_ids": tokens(1), "seed": 1})])
    assert row == RowId(gone.slot, gone.generation + 1)
    with pytest.raises(StaleRowError):
        await restored.nack(log, [gone])


@virtual_time
async def test_a_lease_from_before_a_snapshot_is_not_taken_for_a_new_one() -> None:
    queue, log = await half_done()
    restored = fresh()
    await restored.restore(await queue.snapshot())
    new = await restored.claim("log")
    assert new.lease_id > log.lease_id


@virtual_time
async def test_a_snapshot_wakes_who_waits_at_the_restored_queue() -> None:
    queue, _ = await half_done()
    restored = fresh()
    waiter = asyncio.create_task(restored.claim("rollout"))
    await asyncio.sleep(1)
    await restored.restore(await queue.snapshot())
    assert orders(await waiter) == [2]


@virtual_time
async def test_a_queue_that_has_held_rows_is_not_restored() -> None:
    queue, _ = await half_done()
    with pytest.raises(QueueError, match="has held rows"):
        await queue.restore(await queue.snapshot())


@virtual_time
async def test_a_snapshot_of_another_table_is_refused() -> None:
    queue, _ = await half_done()
    with pytest.raises(QueueError, match="another table"):
        await queue_of(table()).restore(await queue.snapshot())


@virtual_time
async def test_a_snapshot_with_another_kind_of_column_is_refused() -> None:
    queue, _ = await half_done()
    columns = {**COLUMNS, "seed": ColumnKind.FLOAT}
    tasks = (QueueTask(ROLLOUT, FirstIn(2)), QueueTask(TaskSpec(name="log", reads=("seed",)), WholeGroups(9)))
    with pytest.raises(QueueError, match="column 'seed' of the snapshot holds int; in this queue: float"):
        await LocalQueue(tasks, LocalQueueConfig(), columns=columns).restore(await queue.snapshot())


def changed(snapshot: bytes, **fields: Any) -> bytes:
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(snapshot), **fields})


@virtual_time
async def test_what_is_not_a_sound_snapshot_is_refused_and_changes_nothing() -> None:
    queue, _ = await half_done()
    snapshot = await queue.snapshot()
    sound = msgspec.msgpack.decode(snapshot)
    without_slots = [[], *sound["control"][1:]]
    for bad, message in (
        (b"", "0 bytes are not a snapshot"),
        (b"\x00garbage", "are not a snapshot"),
        (snapshot[:-5], "are not a snapshot"),
        (changed(snapshot, version=1), "version 1; expected 'tailrace transfer queue' version 4"),
        (changed(snapshot, format="other"), "the snapshot is 'other'"),
        (changed(snapshot, control=without_slots), "contradicts itself"),
        (changed(snapshot, parts=[b"123", *sound["parts"][1:]]), "corrupt"),
        (changed(snapshot, parts=sound["parts"][1:]), "the cells of 1"),
        (changed(snapshot, parts=3), "are not a snapshot"),
    ):
        restored = fresh()
        with pytest.raises(QueueError, match=message):
            await restored.restore(bad)
        assert await restored.stats() == await fresh().stats()
        await restored.restore(snapshot)


@virtual_time
async def test_an_empty_queue_survives_a_snapshot() -> None:
    restored = fresh()
    await restored.restore(await fresh().snapshot())
    assert await restored.stats() == await fresh().stats()
