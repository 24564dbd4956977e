"""A queue whose cells lie in a Redis server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailrace.config.queue_table import TableConfig, TaskConfig
from tailrace.config.transfer import RedisStorageConfig, ServiceQueueConfig
from tailrace.errors import GroupExists, QueueError
from tailrace.transfer.queue.base import NewRow
from tailrace.transfer.queue.client.sync_queue import SyncQueue
from tailrace.transfer.queue.processes import plan
from tailrace.transfer.queue.processes.supervisor import QueueProcesses
from tests.transfer.processes.served import serving

TABLE = TableConfig(tasks=(TaskConfig(name="sink", reads=("prompt_ids",)),))


def group(number: int) -> list[NewRow]:
    """A group of one row that is too large for the controller to know its cells."""
    cells = {"prompt_ids": np.full(2000, number)}
    return [NewRow(group_id=number, group_size=1, order=number, cells=cells)]


@pytest.fixture
def server(redis_url: str) -> Iterator[Any]:
    """A client of the emptied server."""
    from redis import Redis

    with Redis.from_url(redis_url) as made:
        made.flushall()
        yield made


def test_groups_that_an_emptied_server_has_lost_are_put_again(tmp_path: Path, redis_url: str, server: Any) -> None:
    with serving(tmp_path, TABLE, storage={"type": "redis", "url": redis_url}) as (_, queue):
        queue.put(group(1))
        queue.put(group(2))
        server.flushall()
        queue.put(group(3))
        with pytest.raises(GroupExists):
            queue.put(group(1))
        [row] = queue.claim("sink", limit=1).rows
        assert row.group_id == 3, "the rows before it, which cannot be read, do not bar it"
        assert sorted(queue.lost_groups()) == [1, 2]
        queue.put(group(1))
        [row] = queue.claim("sink", limit=1).rows
        assert np.array_equal(row.cells["prompt_ids"], np.full(2000, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("resume", [False, True])
def test_a_queue_leaves_its_rows_in_the_server_to_the_next_start_if_there_is_one(
    tmp_path: Path, redis_url: str, server: Any, resume: bool
) -> None:
    config = ServiceQueueConfig(units=2, storage=RedisStorageConfig(url=redis_url))
    with QueueProcesses(config, TABLE, tmp_path, resume=resume) as processes:
        with SyncQueue(processes.address, name="test") as queue:
            for number in range(4):
                queue.put(group(number))
        names = {key.split(b":")[0] for key in server.scan_iter()}
        assert sorted(name.removeprefix(b"tailrace-")[-7:] for name in names) == [b"-unit-0", b"-unit-1"]
    assert server.dbsize() == (4 + 2 if resume else 0), "4 rows, and a list of them for each of 2 units"


def test_a_server_that_is_gone_at_the_end_of_a_queue_fails_nothing(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise QueueError("Redis at socket failed: it is gone")

    monkeypatch.setattr(plan, "clear_storage", fail)
    with QueueProcesses(ServiceQueueConfig(units=1, storage=RedisStorageConfig(url=redis_url)), TABLE, tmp_path):
        pass
    assert "what the queue has stored is left there: Redis at socket failed: it is gone" in caplog.text
