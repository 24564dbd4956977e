"""The queue's counts become events until it is closed."""

import asyncio
from typing import Any

import numpy as np
import pytest

from tailrace.algorithms.table import ROLLOUT
from tailrace.config.transfer import LocalQueueConfig
from tailrace.errors import QueueClosed, QueueError
from tailrace.events import Event, EventLog
from tailrace.run.observer import Observer
from tailrace.transfer.queue.base import NewRow, QueueStats
from tailrace.transfer.queue.local.queue import LocalQueue
from tailrace.transfer.queue.policies.first_in import FirstIn
from tailrace.transfer.queue.policies.groups import WholeGroups
from tailrace.transfer.queue.rows.table import QueueTask
from tailrace.types import TaskSpec, Value
from tests.transfer.virtual_time import settle


class Queue(LocalQueue):
    """A queue that counts requests for its stats, and may refuse to answer."""

    def __init__(self, **options: Any) -> None:
        sink = QueueTask(TaskSpec(name="sink", reads=ROLLOUT.writes), FirstIn(100))
        super().__init__([QueueTask(ROLLOUT.spec, WholeGroups(2)), sink], LocalQueueConfig(), **options)
        self.asked = asyncio.Semaphore(0)
        self.error: QueueError | None = None

    async def stats(self) -> QueueStats:
        self.asked.release()
        if self.error is not None:
            raise self.error
        return await super().stats()


async def put_groups(queue: Queue, count: int) -> None:
    cells: dict[str, Value] = {"prompt_ids": np.arange(1, 4), "task": "", "seed": 1}
    for group in range(count):
        await queue.put([NewRow(group_id=group, group_size=2, order=n, cells=cells) for n in range(2)])


async def test_each_look_at_the_queue_is_an_event_until_it_is_closed(log: EventLog, events: list[Event]) -> None:
    queue = Queue()
    await put_groups(queue, 3)
    await queue.claim("rollout")
    async with asyncio.timeout(10), asyncio.TaskGroup() as running:
        running.create_task(Observer(queue, log, every_s=0.001).run())
        for _ in range(3):
            await queue.asked.acquire()
        await queue.close()
    assert len(events) >= 3
    assert {(event.task, event.actor) for event in events} == {("queue", "driver")}
    stored = (await queue.stats()).bytes
    assert events[0].metrics == {
        "ready/rollout": 2.0, "leased/rollout": 4.0, "waiting/rollout": 0.0,
        "ready/sink": 0.0, "leased/sink": 0.0, "waiting/sink": 6.0,
        "expired/rollout": 0.0, "expired/sink": 0.0,
        "rows": 6.0, "bytes": float(stored), "lost_groups": 0.0, "lacking_rows": 0.0,
    }  # fmt: skip


async def test_the_end_of_the_queue_is_seen_at_once_with_what_came_back_until_then(
    log: EventLog, events: list[Event]
) -> None:
    now = 0.0
    queue = Queue(clock=lambda: now)
    await put_groups(queue, 3)
    await queue.claim("rollout")
    async with asyncio.timeout(10), asyncio.TaskGroup() as running:
        running.create_task(Observer(queue, log, every_s=3600.0).run())
        await queue.asked.acquire()
        now = 3600.0  # beyond the lease
        await queue.claim("rollout")
        await queue.close()
    assert [event.metrics["expired/rollout"] for event in events] == [0.0, 4.0]


async def test_groups_that_stay_lost_are_not_looked_at_again_and_again(log: EventLog, events: list[Event]) -> None:
    class Lossy(Queue):
        async def lost_groups(self, *, timeout: float | None = None) -> dict[int, int]:
            await asyncio.sleep(0)
            return {1: 0}

    queue = Lossy()
    observing = asyncio.create_task(Observer(queue, log, every_s=3600.0).run())
    await settle()
    observing.cancel()
    await asyncio.wait([observing])
    assert len(events) == 1


async def test_a_queue_whose_processes_were_given_up_ends_it(log: EventLog, events: list[Event]) -> None:
    queue = Queue()
    queue.error = QueueClosed("no more")
    await asyncio.wait_for(Observer(queue, log, every_s=60.0).run(), 10)
    assert events == []


async def test_a_queue_that_does_not_answer_is_an_error(log: EventLog) -> None:
    queue = Queue()
    queue.error = QueueError("no answer")
    with pytest.raises(QueueError, match="no answer"):
        await asyncio.wait_for(Observer(queue, log, every_s=60.0).run(), 10)
