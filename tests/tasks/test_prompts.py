"""Prompts enter the queue once each, in the order that the seed fixes."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from tailrace.config.algorithm import AdaptiveKl, KlConfig
from tailrace.config.transfer import LocalQueueConfig
from tailrace.errors import GroupExists, QueueClosed, QueueError, QueueTimeout, StaleRowError, StorageFull
from tailrace.planning.kl_control import KlCoefficients
from tailrace.prompts.order import PromptOrder
from tailrace.tasks.prompts import PromptFeeder, put_lost_groups
from tailrace.transfer.queue.base import NewRow, RowId
from tailrace.transfer.queue.local.queue import LocalQueue
from tailrace.transfer.queue.policies.first_in import FirstIn
from tailrace.transfer.queue.rows.table import QueueTask
from tailrace.types import Prompt, TaskSpec, Value

READS = ("prompt_ids", "prompt", "answer", "metadata", "task", "seed")

PROMPTS = tuple(
    Prompt(
        prompt_id=f"p{k}",
        text=f"text {k}",
        question=f"question {k}",
        prompt_ids=np.arange(k + 1, dtype=np.int64),
        answer=str(k),
        metadata={"task": f"task {k}"},
    )
    for k in range(5)
)


def make(queue: LocalQueue) -> PromptFeeder:
    return PromptFeeder(queue, PROMPTS, seed=3, shuffle=True, group_size=2, groups_per_step=3)


def make_tasks() -> list[QueueTask]:
    return [QueueTask(TaskSpec(name="rollout", reads=READS), FirstIn(1000))]


def make_queue() -> LocalQueue:
    return LocalQueue(make_tasks(), LocalQueueConfig())


async def test_a_step_puts_its_groups_in_the_seeded_order() -> None:
    queue = make_queue()
    feeder = make(queue)
    await queue.advance(3)
    for step in range(4):
        await feeder.put(step)
    claim = await queue.claim("rollout")
    order = PromptOrder(count=len(PROMPTS), seed=3, shuffle=True)
    assert [row.order for row in claim.rows] == list(range(24))
    assert [row.group_id for row in claim.rows] == [position for position in range(12) for _ in range(2)]
    assert [row.cells["prompt"] for row in claim.rows] == [PROMPTS[order[k // 2]].text for k in range(24)]
    assert [row.cells["task"] for row in claim.rows] == [f"task {order[k // 2]}" for k in range(24)]
    assert len({row.cells["seed"] for row in claim.rows}) == 24


async def test_rows_have_the_coefficient_of_their_step_once_the_steps_before_have_ended() -> None:
    task = QueueTask(TaskSpec(name="rollout", reads=("kl_coefficient",)), FirstIn(1000))
    queue = LocalQueue([task], LocalQueueConfig())
    kl = KlCoefficients(KlConfig(coefficient=0.1, adaptive=AdaptiveKl(target=0.1)), 1)
    feeder = PromptFeeder(queue, PROMPTS, seed=3, shuffle=True, group_size=1, groups_per_step=2, max_staleness=1, kl=kl)
    await queue.advance(4)
    running = asyncio.create_task(feeder.run(4))

    async def coefficients(count: int) -> list[Value]:
        found: list[Value] = []
        while len(found) < count:
            found += [row.cells["kl_coefficient"] for row in (await queue.claim("rollout")).rows]
        return found

    assert await coefficients(4) == [0.1] * 4
    assert feeder.next_step == 2
    feeder.follow_kl(0.2)
    assert await coefficients(2) == [0.2] * 2
    assert feeder.next_step == 3
    feeder.follow_kl(0.3)
    assert await coefficients(2) == [0.3] * 2
    await running
    again = [feeder.group_again(group, remade)[0].cells["kl_coefficient"] for group in (3, 4) for remade in (0, 2)]
    assert again == [0.1, 0.1, 0.2, 0.2]


async def test_a_resumed_feeder_does_not_put_a_step_again() -> None:
    queue = make_queue()
    feeder = make(queue)
    feeder.resume_at(2)
    await queue.advance(2)
    await feeder.put(1)
    assert (await queue.stats()).rows == 0
    await feeder.put(2)
    assert [row.group_id for row in (await queue.claim("rollout")).rows] == [6, 6, 7, 7, 8, 8]


async def test_a_step_whose_put_was_cancelled_after_it_happened_is_resumed_at() -> None:
    first = make_queue()
    await make(first).put(0)
    second = make_queue()
    await second.restore(await first.snapshot())
    await second.advance(1)
    feeder = make(second)
    feeder.resume_at(0)
    await feeder.put(0)
    await feeder.put(1)
    assert ((await second.stats()).rows, feeder.next_step) == (12, 2)


async def test_the_rest_of_a_step_is_put_by_a_resumed_run_whose_queue_had_only_some_of_its_groups() -> None:
    whole = make_queue()
    await make(whole).put(0)
    rows = (await whole.claim("rollout")).rows
    queue = make_queue()
    here = [row for row in rows if row.group_id == 1]
    cells = [NewRow(group_id=1, group_size=2, order=row.order, cells=row.cells, not_before=0) for row in here]
    await queue.put(cells)
    feeder = make(queue)
    feeder.resume_at(0)
    await feeder.put(0)
    await queue.advance(1)
    await feeder.put(1)
    assert feeder.next_step == 2
    claimed = [row.group_id for row in (await queue.claim("rollout")).rows]
    assert sorted(claimed) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


async def test_a_step_that_somebody_else_has_put_is_an_error() -> None:
    queue = make_queue()
    await make(queue).put(0)
    with pytest.raises(GroupExists):
        await make(queue).put(0)


class Losing(LocalQueue):
    """A queue that reports lost groups, one list after the other, and has no room for the first `full` puts."""

    def __init__(self, *lost: list[int], full: int = 0, error: QueueError | None = None) -> None:
        super().__init__(make_tasks(), LocalQueueConfig())
        self.lost, self.full, self.error = list(lost), full, error or QueueTimeout("no room")

    async def lost_groups(self, *, timeout: float | None = None) -> dict[int, int]:
        if not self.lost:
            raise QueueClosed("closed")
        return dict.fromkeys(self.lost.pop(0), 0)

    async def put(self, rows: Sequence[NewRow], *, timeout: float | None = None) -> list[RowId]:
        if self.full:
            self.full -= 1
            raise self.error
        return await super().put(rows, timeout=timeout)


async def test_a_lost_group_that_was_put_again_meanwhile_is_passed_over() -> None:
    queue = Losing([1, 3])
    feeder = make(queue)
    await feeder.put(0)
    await put_lost_groups(queue, feeder.group_again)
    assert (await queue.stats()).rows == 8


PASSING = [QueueTimeout("no room"), StorageFull("no room in the units"), StaleRowError("the unit died")]


@pytest.mark.parametrize("error", PASSING, ids=lambda error: type(error).__name__)
async def test_a_lost_group_that_could_not_be_put_is_put_when_the_queue_tells_of_it_again(error: QueueError) -> None:
    queue = Losing([1], [1], full=1, error=error)
    await put_lost_groups(queue, make(queue).group_again)
    assert [row.group_id for row in (await queue.claim("rollout")).rows] == [1, 1]


@pytest.mark.parametrize("error", PASSING, ids=lambda error: type(error).__name__)
async def test_a_step_that_could_not_be_put_is_put_again(error: QueueError) -> None:
    queue = Losing(full=2, error=error)
    await make(queue).run(1)
    assert (await queue.stats()).rows == 6


async def test_a_lost_group_is_put_again_as_it_was_whatever_the_version() -> None:
    first, second = make_queue(), Losing([1, 0])
    await make(first).put(0)
    await put_lost_groups(second, make(second).group_again)
    before = {row.order: row.cells for row in (await first.claim("rollout")).rows}
    again = (await second.claim("rollout")).rows
    assert [row.order for row in again] == [0, 1, 2, 3]
    assert all(row.cells["seed"] == before[row.order]["seed"] for row in again)
    assert all(row.cells["prompt"] == before[row.order]["prompt"] for row in again)


async def test_a_remade_group_has_another_prompt_each_time_always_the_same() -> None:
    feeder, again = make(make_queue()), make(make_queue())

    def cells(of: PromptFeeder, remade: int) -> list[tuple[int, int, str]]:
        return [(row.order, row.cells["seed"], row.cells["prompt"]) for row in of.group_again(1, remade)]  # type: ignore[misc]

    times = [cells(feeder, remade) for remade in range(4)]
    assert times == [cells(again, remade) for remade in range(4)]
    assert {order for rows in times for order, _, _ in rows} == {order for order, _, _ in times[0]}
    seeds = [seed for rows in times for _, seed, _ in rows]
    assert len(set(seeds)) == len(seeds)
    assert len({prompt for rows in times for _, _, prompt in rows}) > 1
