"""Rows of old weights first: the policy alone, and with versions that come from cells."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import QueueError
from tailrace.transfer.queue.base import NewRow
from tailrace.transfer.queue.local.queue import LocalQueue
from tailrace.transfer.queue.policies.base import RowMeta
from tailrace.transfer.queue.policies.first_in import FirstIn
from tailrace.transfer.queue.policies.oldest_version import OldestVersionFirst
from tailrace.transfer.queue.rows.table import QueueTask
from tailrace.types import TaskSpec
from tests.transfer.policies.rows import fill, orders_of, rows_of
from tests.transfer.tables import one_task, orders, queue_of, tokens
from tests.transfer.virtual_time import virtual_time


def test_the_oldest_version_comes_first_and_equal_ones_by_order() -> None:
    policy = OldestVersionFirst(3)
    fill(policy, rows_of(1, 1, version=2), rows_of(2, 1, 1, version=1), rows_of(3, 1, version=0))
    assert orders_of(policy.take(None)) == [300, 200, 201]
    assert orders_of(policy.take(None)) == [100]


def test_a_late_row_of_an_old_version_passes_those_that_wait() -> None:
    policy = OldestVersionFirst(1)
    fill(policy, rows_of(1, 1, 1, version=7))
    assert orders_of(policy.take(None)) == [100]
    fill(policy, rows_of(9, 1, version=6))
    assert orders_of(policy.take(None)) == [900]


def test_rows_of_unknown_version_never_starve() -> None:
    policy = OldestVersionFirst(1)
    fill(policy, rows_of(1, 1, version=0), rows_of(2, 0, version=None))
    assert orders_of(policy.take(None)) == [200]


Step = tuple[str, int, int | None]
STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "take", "give back"]), st.integers(1, 4), st.none() | st.integers(0, 3)),
    max_size=40,
)


@given(steps=STEPS)
def test_every_claim_is_what_a_sort_of_all_ready_rows_gives(steps: list[Step]) -> None:
    policy = OldestVersionFirst(3)
    ready: list[RowMeta] = []
    leased: list[RowMeta] = []
    for number, (action, amount, version) in enumerate(steps):
        if action == "add":
            rows = rows_of(number, *[1] * amount, order=-number * 10, version=version)
            fill(policy, rows)
            ready += rows
        elif action == "take":
            ready.sort(key=lambda row: (row.version is not None, row.version or 0, row.order))
            expected, ready = ready[: min(amount, 3)], ready[min(amount, 3) :]
            assert policy.take(amount) == expected
            leased += expected
        else:
            for row in leased[:amount]:
                policy.ready(row)
            ready += leased[:amount]
            del leased[:amount]


def versions_queue() -> LocalQueue:
    rollout = TaskSpec(name="rollout", reads=("prompt_ids",), writes=("weight_versions",))
    judge = TaskSpec(name="judge", reads=("weight_versions",))
    return queue_of((QueueTask(rollout, FirstIn(9)), QueueTask(judge, OldestVersionFirst(1))))


async def judged(queue: LocalQueue) -> list[int]:
    """The orders of the rows that `judge` can claim, in the order of its claims."""
    ready = (await queue.stats()).tasks["judge"].ready
    return [order for _ in range(ready) for order in orders(await queue.claim("judge"))]


@virtual_time
async def test_the_version_of_a_row_is_the_smallest_of_its_tokens() -> None:
    queue = versions_queue()
    versions = [[5, 6], [7, 4], [], [5]]
    await queue.put(
        [NewRow(group_id=i, group_size=1, order=i, cells={"prompt_ids": tokens(1)}) for i in range(len(versions))]
    )
    claim = await queue.claim("rollout")
    cells = [{"weight_versions": np.array(entries, np.int64)} for entries in versions]
    await queue.ack(claim, {row.id: cell for row, cell in zip(claim.rows, cells, strict=True)})
    restored = versions_queue()
    await restored.restore(await queue.snapshot())
    assert await judged(queue) == [2, 1, 0, 3]
    assert await judged(restored) == [2, 1, 0, 3]


@virtual_time
async def test_versions_that_rows_bring_when_they_are_put_count_too() -> None:
    judge = TaskSpec(name="judge", reads=("weight_versions",))
    queue = queue_of((QueueTask(judge, OldestVersionFirst(1)),))
    for order, version in enumerate([3, 1, 2]):
        cells = {"weight_versions": np.array([version], np.int64)}
        await queue.put([NewRow(group_id=order, group_size=1, order=order, cells=cells)])
    assert await judged(queue) == [1, 2, 0]


def test_the_task_must_read_the_versions() -> None:
    with pytest.raises(QueueError, match="policy of task 'only' looks at 'weight_versions', which the task does not"):
        queue_of(one_task(OldestVersionFirst(1)))
