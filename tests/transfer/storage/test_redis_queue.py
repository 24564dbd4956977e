"""A queue whose cells lie in a Redis server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailrace.config.queue_table import TableConfig, TaskConfig
from tailrace.errors import GroupExists
from tailrace.transfer.queue.base import NewRow
from tests.transfer.served import serving

TABLE = TableConfig(tasks=(TaskConfig(name="sink", reads=("prompt_ids",)),))


def group(number: int) -> list[NewRow]:
    """A row that is too large for the controller to know its cells."""
    cells = {"prompt_ids": np.full(2000, number)}
    return [NewRow(group_id=number, group_size=1, order=number, cells=cells)]


@pytest.fixture
def server(redis_url: str) -> Iterator[Any]:
    """The server itself, empty."""
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
        assert np.array_equal(row.cells["prompt_ids"], np.full(2000, 1))
