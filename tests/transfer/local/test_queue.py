import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from tailrace.config.transfer import LocalQueueConfig
from tailrace.errors import (
    ColumnError,
    GroupExists,
    LeaseError,
    QueueClosed,
    QueueError,
    QueueTimeout,
    StaleRowError,
)
from tailrace.host.virtual_loop import VirtualLoop
from tailrace.planning.balance import partition
from tailrace.transfer.queue.base import Claim, NewRow, RowId, TaskStats
from tailrace.transfer.queue.local.queue import LocalQueue
from tailrace.transfer.queue.policies.balanced import BalancedByLength
from tailrace.transfer.queue.policies.base import RowMeta
from tailrace.transfer.queue.policies.first_in import FirstIn
from tailrace.transfer.queue.policies.groups import WholeGroups
from tailrace.transfer.queue.policies.token_budget import TokenBudget
from tailrace.transfer.queue.rows.table import QueueTask
from tailrace.types import Value
from tests.transfer.machine import LEASE_S, TASKS, QueueMachine
from tests.transfer.tables import ROLLOUT, group, one_task, orders, outputs, queue_of, table, tokens
from tests.transfer.virtual_time import settle, virtual_time

T = TypeVar("T")
MAX_BYTES = 1200


class QueueDriver:
    """A local queue in a loop with virtual time."""

    def __init__(self, tasks: Sequence[QueueTask]) -> None:
        self.runner = asyncio.Runner(loop_factory=VirtualLoop)
        self.queue = self.make_queue(tasks)
        self.doomed: asyncio.Task[Claim] | None = None

    def make_queue(self, tasks: Sequence[QueueTask]) -> LocalQueue:
        config = LocalQueueConfig(lease_s=LEASE_S, max_bytes=MAX_BYTES)
        return LocalQueue(tasks, config, clock=self.runner.get_loop().time)

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(call)

    def put(self, rows: Sequence[NewRow]) -> list[RowId]:
        return self.run(self.put_and_cancel(rows))

    async def put_and_cancel(self, rows: Sequence[NewRow]) -> list[RowId]:
        ids = await self.queue.put(rows, timeout=0)
        if self.doomed is not None:
            self.doomed.cancel()
        return ids

    def start_doomed_claim(self, task: str, limit: int) -> None:
        self.doomed = self.runner.get_loop().create_task(self.queue.claim(task, limit=limit))
        self.run(settle())
        assert not self.doomed.done()

    def cancel_doomed_claim(self) -> None:
        assert self.doomed is not None
        self.doomed.cancel()
        self.run(settle())
        assert self.doomed.cancelled()
        self.doomed = None

    def claim(self, task: str, limit: int | None) -> tuple[Claim, list[RowId]] | None:
        try:
            claim = self.run(self.queue.claim(task, limit=limit, timeout=0))
        except QueueTimeout:
            return None
        return claim, [row.id for row in claim.rows]

    def ack(self, claim: Claim, sizes: Mapping[RowId, Mapping[str, int]]) -> None:
        cells: dict[RowId, dict[str, Value]] = {
            row_id: {column: 0.5 if column == "reward" else tokens(size) for column, size in columns.items()}
            for row_id, columns in sizes.items()
        }
        self.run(self.queue.ack(claim, cells))

    def nack(self, claim: Claim, rows: Sequence[RowId] | None) -> None:
        self.run(self.queue.nack(claim, rows))

    def renew(self, claim: Claim) -> None:
        self.run(self.queue.renew(claim))

    def advance(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    def restart(self, tasks: Sequence[QueueTask]) -> None:
        snapshot = self.run(self.queue.snapshot())
        self.run(self.queue.close())
        self.queue = self.make_queue(tasks)
        self.run(self.queue.restore(snapshot))
        assert self.run(self.queue.snapshot()) == snapshot

    def stats(self) -> tuple[int, int, Mapping[str, TaskStats]]:
        stats = self.run(self.queue.stats())
        assert stats.blocked_puts == 0
        return stats.rows, stats.bytes, stats.tasks

    def close(self) -> None:
        self.runner.close()


class LocalQueueMachine(QueueMachine):
    driver: QueueDriver

    def make_driver(self, tasks: Sequence[QueueTask]) -> QueueDriver:
        return QueueDriver(tasks)

    @rule(size=st.integers(1, 4), place=st.integers(0, 500), prompt=st.integers(1, 5))
    def put(self, size: int, place: int, prompt: int) -> None:
        """Put as the base machine does, but expect a refusal of rows that do not fit."""
        if self.model.nbytes + size * prompt * 8 <= MAX_BYTES:
            super().put(size, place, prompt)
        else:
            with pytest.raises(QueueTimeout, match="bytes are taken"):
                self.driver.put(group(self.groups_put, size, prompt=prompt))

    @rule(task=TASKS, size=st.integers(1, 3))
    def cancel_a_claim_in_the_instant_of_a_put(self, task: str, size: int) -> None:
        """Only the put has happened then, whether or not its rows would have satisfied the claim."""
        while self.expect_claim(task, 9) is not None:
            pass
        self.driver.start_doomed_claim(task, 9)
        self.put(size, 0, 1)
        self.driver.cancel_doomed_claim()


TestLocalQueueEqualsAScan = LocalQueueMachine.TestCase
TestLocalQueueEqualsAScan.settings = settings(max_examples=40, stateful_step_count=40)


@virtual_time
async def test_a_claim_holds_the_columns_that_its_task_reads() -> None:
    queue = queue_of(table())
    await queue.put([NewRow(group_id=3, group_size=1, order=7, cells={"prompt_ids": tokens(2), "seed": 5})])
    claim = await queue.claim("rollout")
    [row] = claim.rows
    assert (claim.task, row.group_id, row.order, list(row.cells)) == ("rollout", 3, 7, ["prompt_ids"])
    np.testing.assert_array_equal(row.cells["prompt_ids"], tokens(2))


@virtual_time
async def test_a_waiting_claim_is_woken_by_the_ack_that_writes_its_inputs() -> None:
    queue = queue_of(table())
    await queue.put(group(1))
    waiter = asyncio.create_task(queue.claim("reward"))
    await settle()
    assert not waiter.done()
    claim = await queue.claim("rollout")
    await queue.ack(claim, outputs(claim, response_ids=tokens(3)))
    assert orders(await waiter) == [100]


@virtual_time
async def test_an_expired_lease_returns_its_rows_and_a_late_ack_is_refused() -> None:
    queue = queue_of(table(), lease_s=5)
    await queue.put(group(1))
    lost = await queue.claim("rollout")
    again = await queue.claim("rollout")
    assert asyncio.get_running_loop().time() == 5.0
    assert orders(again) == orders(lost)
    for call in (queue.ack(lost, outputs(lost, response_ids=tokens(1))), queue.nack(lost, [lost.rows[0].id])):
        with pytest.raises(LeaseError, match="not under lease"):
            await call
    await queue.ack(again, outputs(again, response_ids=tokens(2)))
    assert (await queue.stats()).tasks["rollout"].expired == 1


@virtual_time
async def test_a_renewed_lease_lives_on() -> None:
    queue = queue_of(table(), lease_s=5)
    await queue.put(group(1, 2))
    first, second = await queue.claim("rollout"), await queue.claim("rollout")
    await asyncio.sleep(4)
    await queue.renew(first)
    assert orders(await queue.claim("rollout")) == orders(second)
    await asyncio.sleep(3)
    await queue.ack(first, outputs(first, response_ids=tokens(1)))
    await asyncio.sleep(3)
    with pytest.raises(LeaseError, match="cannot be renewed"):
        await queue.renew(second)


@virtual_time
async def test_a_lease_ends_at_its_deadline_even_before_the_timer_has_run() -> None:
    now = 0.0
    queue = LocalQueue(table(), LocalQueueConfig(lease_s=5), clock=lambda: now)
    calls: list[Callable[[Claim], Coroutine[Any, Any, None]]] = [
        lambda claim: queue.ack(claim, outputs(claim, response_ids=tokens(1))),
        lambda claim: queue.nack(claim, [row.id for row in claim.rows]),
        lambda claim: queue.renew(claim),
    ]
    await queue.put(group(1))
    for call in calls:
        claim = await queue.claim("rollout")
        now += 5.0
        with pytest.raises(LeaseError):
            await call(claim)
    await queue.claim("rollout")
    now += 5.0
    assert orders(await queue.claim("rollout", timeout=0)) == [100]


@virtual_time
async def test_a_row_acked_by_every_task_is_stale() -> None:
    queue = queue_of(one_task(FirstIn(1)))
    await queue.put(group(1))
    claim = await queue.claim("only")
    await queue.ack(claim, outputs(claim))
    await queue.put(group(2))
    for call in (queue.ack(claim, outputs(claim)), queue.nack(claim, [claim.rows[0].id])):
        with pytest.raises(StaleRowError):
            await call
    await queue.nack(claim)
    assert (await queue.stats()).tasks["only"].ready == 1


@virtual_time
async def test_a_refused_ack_writes_nothing_at_all() -> None:
    queue = queue_of(table(FirstIn(2)))
    await queue.put(group(1, 2))
    claim = await queue.claim("rollout")
    good, bad = (row.id for row in claim.rows)
    before = await queue.stats()
    wrong: list[dict[str, Value]] = [
        {"response_ids": np.zeros(2)},
        {},
        {"response_ids": tokens(1), "reward": 1.0},
        {"speed": 1},
    ]
    for cells in wrong:
        with pytest.raises(ColumnError):
            await queue.ack(claim, {good: {"response_ids": tokens(4)}, bad: cells})
    assert await queue.stats() == before
    await queue.ack(claim, outputs(claim, response_ids=tokens(4)))


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([NewRow(group_id=1, group_size=1, order=9, cells={})], ColumnError, "row 9 of group 1 lacks .*'prompt_ids'"),
        (
            [NewRow(group_id=1, group_size=1, order=9, cells={"prompt_ids": tokens(1), "reward": 1.0})],
            ColumnError,
            "brings column 'reward', which a task writes",
        ),
        (group(1, 3)[1:], QueueError, "group_size 3, but 2"),
        ([*group(1, 2), NewRow(group_id=2, group_size=1, order=0, cells={"prompt_ids": 1})], ColumnError, "got int"),
        (group(1, 9), QueueError, "9 rows and 144 bytes can never fit queue.max_rows 8"),
        (group(1, prompt=200), QueueError, "1 rows and 1600 bytes can never fit queue.max_bytes 1000"),
    ],
)
async def test_a_bad_put_is_an_error_at_once_and_stores_nothing(
    rows: list[NewRow], error: type[QueueError], message: str
) -> None:
    queue = queue_of(table(), max_rows=8, max_bytes=1000)
    with pytest.raises(error, match=message):
        await queue.put(rows)
    stats = await queue.stats()
    assert (stats.rows, stats.bytes) == (0, 0)


@virtual_time
async def test_a_group_that_came_while_its_double_waited_for_room_is_refused() -> None:
    queue = queue_of(one_task(FirstIn(1)), max_rows=1)
    await queue.put(group(1))
    puts = [asyncio.create_task(queue.put(group(2))) for _ in range(2)]
    await settle()
    for _ in range(2):
        claim = await queue.claim("only")
        await queue.ack(claim, outputs(claim))
    assert len(await puts[0]) == 1
    with pytest.raises(GroupExists):
        await puts[1]


@virtual_time
async def test_rows_for_a_later_version_wait_for_it_and_hold_up_nobody() -> None:
    queue = queue_of(one_task(FirstIn(1)))
    early = asyncio.create_task(queue.put([replace(row, not_before=5) for row in group(1)]))
    await asyncio.sleep(3)
    await queue.put(group(2), timeout=0)
    await queue.advance(3)
    stats = await queue.stats()
    assert (stats.blocked_puts, stats.blocked_by) == (1, "weight version 3; its rows are for 5")
    await queue.advance(5)
    await early
    stats = await queue.stats()
    assert (stats.rows, stats.version, stats.blocked_by, stats.put_wait_s) == (2, 5, None, 3.0)


@virtual_time
async def test_nothing_is_lost_in_one_process() -> None:
    queue = queue_of(one_task(FirstIn(1)))
    with pytest.raises(QueueTimeout, match="in 2 s no group was lost"):
        await queue.lost_groups(timeout=2)
    waiter = asyncio.create_task(queue.lost_groups())
    await settle()
    await queue.close()
    with pytest.raises(QueueClosed):
        await waiter


@virtual_time
async def test_a_put_of_nothing_waits_behind_nobody() -> None:
    queue = queue_of(one_task(FirstIn(1)), max_rows=1)
    await queue.put(group(1))
    waiting = asyncio.create_task(queue.put(group(2)))
    await settle()
    assert await queue.put([], timeout=1.0) == []
    waiting.cancel()


@virtual_time
async def test_room_wakes_producers_in_the_order_in_which_they_came() -> None:
    queue = queue_of(one_task(FirstIn(4)), max_rows=4)
    await queue.put(group(0, 4))
    big = asyncio.create_task(queue.put(group(1, 3)))
    await settle()
    small = asyncio.create_task(queue.put(group(2, 1)))
    await settle()
    assert (await queue.stats()).blocked_puts == 2
    claim = await queue.claim("only")
    await queue.ack(claim, {claim.rows[0].id: {}})
    await settle()
    assert (big.done(), small.done()) == (False, False), "a small put must not overtake"
    await queue.ack(claim, {row.id: {} for row in claim.rows[1:3]})
    await settle()
    assert (big.done(), small.done()) == (True, False)
    await queue.ack(claim, {claim.rows[3].id: {}})
    await settle()
    assert small.done()
    assert (await queue.stats()).blocked_puts == 0


@virtual_time
async def test_acks_are_never_blocked_but_their_bytes_block_puts() -> None:
    queue = queue_of(table(), max_bytes=100)
    await queue.put(group(1, prompt=5))
    claim = await queue.claim("rollout")
    await queue.ack(claim, outputs(claim, response_ids=tokens(50)))
    assert (await queue.stats()).bytes == 40 + 400
    with pytest.raises(QueueTimeout, match=r"1 of 65536 rows and 440 of 100 bytes are taken"):
        await queue.put(group(2, prompt=1), timeout=3)
    assert asyncio.get_running_loop().time() == 3.0


@virtual_time
async def test_a_put_cancelled_in_the_instant_of_room_stores_nothing_and_wakes_the_next() -> None:
    queue = queue_of(one_task(FirstIn(1)), max_rows=1)
    await queue.put(group(1))
    first, second = (asyncio.create_task(queue.put(group(number))) for number in (2, 3))
    await settle()
    claim = await queue.claim("only")
    await queue.ack(claim, outputs(claim))
    first.cancel()
    await second
    assert first.cancelled()
    assert orders(await queue.claim("only")) == [300]
    assert (await queue.stats()).rows == 1


@virtual_time
async def test_a_claim_cancelled_in_the_instant_of_rows_leaks_no_lease_and_wakes_the_next() -> None:
    queue = queue_of(table())
    first, second = (asyncio.create_task(queue.claim("rollout")) for _ in range(2))
    await settle()
    await queue.put(group(1))
    first.cancel()
    assert orders(await second) == [100]
    assert first.cancelled()
    assert (await queue.stats()).tasks["rollout"].leased == 1


@virtual_time
async def test_a_claim_that_times_out_leaves_nothing_and_wakes_the_next() -> None:
    queue = queue_of(table(actor=TokenBudget(None, window=1)), timeout_s=2)
    await queue.put(group(1))
    for task, cells in (("rollout", {"response_ids": tokens(1)}), ("reward", {"reward": 1.0})):
        claim = await queue.claim(task)
        await queue.ack(claim, outputs(claim, **cells))
    greedy = asyncio.create_task(queue.claim("actor", limit=4))
    await settle()
    modest = asyncio.create_task(queue.claim("actor", limit=1, timeout=10))
    with pytest.raises(QueueTimeout, match=r"'actor' waited 2 s: of its rows 0 lack inputs, 1 are ready"):
        await greedy
    assert orders(await modest) == [100]


@virtual_time
async def test_a_big_claim_is_not_overtaken_by_small_ones() -> None:
    queue = queue_of(one_task(TokenBudget(None, window=1)))
    big = asyncio.create_task(queue.claim("only", limit=3))
    await settle()
    small = asyncio.create_task(queue.claim("only", limit=1))
    for number in range(4):
        await settle()
        assert not small.done()
        await queue.put(group(number))
    assert orders(await big) == [0, 100, 200]
    assert orders(await small) == [300]


@virtual_time
async def test_one_put_serves_every_waiting_consumer() -> None:
    queue = queue_of(one_task(WholeGroups(1)))
    waiters = [asyncio.create_task(queue.claim("only")) for _ in range(3)]
    await settle()
    await queue.put(group(1, 2) + group(2, 2) + group(3, 2))
    assert [orders(await waiter) for waiter in waiters] == [[100, 101], [200, 201], [300, 301]]


@virtual_time
async def test_close_wakes_everyone_and_refuses_what_comes_later() -> None:
    queue = queue_of(table(), max_rows=2)
    await queue.put(group(1, 2))
    claim = await queue.claim("rollout")
    calls: list[Callable[[], Coroutine[Any, Any, Any]]] = [
        lambda: queue.put(group(2)),
        lambda: queue.put(group(3)),
        lambda: queue.claim("actor", limit=1),
        lambda: queue.claim("actor", limit=1),
    ]
    waiters = [asyncio.create_task(call()) for call in calls]
    await settle()
    await queue.close()
    for waiter in waiters:
        with pytest.raises(QueueClosed):
            await waiter
    for call in calls:
        with pytest.raises(QueueClosed):
            await call()
    await queue.ack(claim, outputs(claim, response_ids=tokens(1)))
    stats = await queue.stats()
    assert (stats.blocked_puts, stats.tasks["reward"].waiting, stats.tasks["rollout"].consumed) == (0, 1, 1)
    await queue.close()


@virtual_time
async def test_after_close_rows_can_be_given_back_and_snapshot() -> None:
    queue = queue_of(table())
    await queue.put(group(1))
    claim = await queue.claim("rollout")
    await queue.close()
    await queue.nack(claim)
    other = queue_of(table())
    await other.restore(await queue.snapshot())
    assert orders(await other.claim("rollout")) == [100]


class BrokenPolicy(FirstIn):
    """A policy that fails when it is asked for rows."""

    def take(self, limit: int | None, rank: int | None = None) -> list[RowMeta]:
        raise ZeroDivisionError("broken")


@virtual_time
async def test_the_error_of_a_policy_reaches_the_caller_who_waits() -> None:
    queue = queue_of((QueueTask(ROLLOUT, BrokenPolicy(1)),))
    with pytest.raises(ZeroDivisionError, match="broken"):
        await queue.claim("rollout")
    await queue.put(group(1))


@virtual_time
async def test_unknown_tasks_and_bad_limits_are_refused() -> None:
    queue = queue_of(table())
    with pytest.raises(QueueError, match=r"no task 'critic' in the table; its tasks are \['actor', 'reward'"):
        await queue.claim("critic")
    with pytest.raises(QueueError, match="limit must be at least 1, got 0"):
        await queue.claim("actor", limit=0)


@virtual_time
async def test_a_limit_below_the_group_size_is_refused_once_the_group_is_there() -> None:
    queue = queue_of(one_task(WholeGroups(1)))
    waiter = asyncio.create_task(queue.claim("only", limit=1))
    await settle()
    await queue.put(group(1, 2))
    with pytest.raises(QueueError, match="leave room for a whole group"):
        await waiter
    assert len((await queue.claim("only")).rows) == 2


def split_queue(ranks: int, rows: int, **config: float) -> LocalQueue:
    """A queue whose one task is split among ranks: row by row if `rows` equals `ranks`."""
    split = partial(partition, equal_count=True)
    return queue_of(one_task(BalancedByLength(ranks, rows, partition=split, cost_columns=("prompt_ids",))), **config)


@virtual_time
async def test_a_rank_that_is_ahead_does_not_stand_before_the_one_it_waits_for() -> None:
    queue = split_queue(2, 2)
    await queue.put(group(0) + group(1) + group(2) + group(3))
    assert orders(await queue.claim("only", rank=0)) == [0]
    ahead = asyncio.create_task(queue.claim("only", rank=0))
    await settle()
    assert not ahead.done()
    assert orders(await queue.claim("only", rank=1)) == [100]
    assert orders(await ahead) == [200], "woken by the claim of the other rank"
    assert orders(await queue.claim("only", rank=1)) == [300]


@virtual_time
async def test_one_put_serves_every_waiting_rank() -> None:
    queue = split_queue(3, 3)
    waiters = [asyncio.create_task(queue.claim("only", rank=rank)) for rank in (2, 0, 1)]
    await settle()
    await queue.put(group(0, 3))
    assert [orders(await waiter) for waiter in waiters] == [[2], [0], [1]]


@virtual_time
async def test_an_expired_part_goes_to_the_same_rank_again() -> None:
    queue = split_queue(2, 2, lease_s=5)
    await queue.put(group(0, 2) + group(1, 2))
    await queue.claim("only", rank=0)
    done = await queue.claim("only", rank=1)
    await queue.ack(done, outputs(done))
    await asyncio.sleep(6)
    other = asyncio.create_task(queue.claim("only", rank=1))
    await settle()
    assert not other.done(), "rank 0 has rows to take again"
    assert orders(await queue.claim("only", rank=0)) == [0]
    assert orders(await other) == [101]


@virtual_time
async def test_a_part_that_was_leased_at_a_snapshot_is_split_anew() -> None:
    queue = split_queue(2, 2)
    await queue.put(group(0, 2))
    await queue.claim("only", rank=1)
    restored = split_queue(2, 2)
    await restored.restore(await queue.snapshot())
    assert [orders(await restored.claim("only", rank=rank)) for rank in (0, 1)] == [[0], [1]]


@virtual_time
async def test_claims_with_a_wrong_rank_or_none_are_refused_at_once() -> None:
    queue = split_queue(2, 2)
    with pytest.raises(QueueError, match="names no rank, but policy 'balanced' splits batches among ranks 0 to 1"):
        await queue.claim("only")
    with pytest.raises(QueueError, match="names rank 2, but policy 'balanced' splits batches among ranks 0 to 1"):
        await queue.claim("only", rank=2)
    with pytest.raises(QueueError, match="names rank 0, but policy 'first_in' splits nothing among ranks"):
        await queue_of(table()).claim("rollout", rank=0)


@virtual_time
async def test_a_rank_that_waited_its_limit_is_named() -> None:
    with pytest.raises(QueueTimeout, match="rank 1 of task 'only' waited 3 s"):
        await split_queue(2, 2).claim("only", rank=1, timeout=3)


@virtual_time
async def test_close_wakes_every_rank() -> None:
    queue = split_queue(2, 2)
    waiters = [asyncio.create_task(queue.claim("only", rank=rank)) for rank in (0, 1)]
    await settle()
    await queue.close()
    for waiter in waiters:
        with pytest.raises(QueueClosed):
            await waiter


async def test_a_remade_group_enters_a_full_queue_before_those_who_wait_for_room() -> None:
    queue = LocalQueue(table(WholeGroups(9), WholeGroups(9)), LocalQueueConfig(max_rows=2))
    await queue.put(group(1, 2))
    blocked = asyncio.create_task(queue.put(group(2, 2)))
    claim = await queue.claim("rollout")
    assert await queue.remake(claim, [1], most=1) == [1]
    await blocked
    assert await queue.lost_groups() == {1: 1}
    await queue.put(group(1, 2))
    assert (await queue.stats()).rows == 4
    claims = [await queue.claim("rollout", limit=2) for _ in range(2)]
    assert sorted(row.group_id for one in claims for row in one.rows) == [1, 1, 2, 2]
