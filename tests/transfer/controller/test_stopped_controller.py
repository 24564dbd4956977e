"""A controller that was stopped for long counts all who were alive before as alive, until they have been heard."""

from pathlib import Path

import numpy as np
import pytest

from tailrace.errors import QueueTimeout
from tailrace.transfer.queue.base import NewRow
from tailrace.transfer.queue.client.sync_queue import SyncQueue
from tailrace.transfer.wire import server
from tailrace.transfer.wire.clock import RunningClock
from tests.transfer.client.servers import serving
from tests.transfer.remote.clock import Clock

STOPPED_S = 3600.0


def rows(count: int) -> list[NewRow]:
    cells = {"prompt_ids": np.arange(3)}
    return [NewRow(group_id=group, group_size=1, order=group, cells=cells) for group in range(count)]


def test_units_rows_and_leases_outlast_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(server, "RunningClock", lambda: RunningClock(clock))
    with (
        serving(tmp_path, units=2, unit_limit_s=10.0, lease_s=10.0) as served,
        SyncQueue(served.address, name="test") as queue,
    ):
        for row in rows(4):
            queue.put([row])
        claim = queue.claim("rollout", limit=1)
        before = queue.stats()
        clock.jump(STOPPED_S)
        with pytest.raises(QueueTimeout):  # so the controller's timers have run since
            queue.claim("actor", timeout=0.001)
        after = queue.stats()
        assert (after.rows, after.lost_groups) == (4, 0)
        assert [unit.number for unit in after.units if unit.alive] == [unit.number for unit in before.units]
        assert (after.tasks["rollout"].leased, after.tasks["rollout"].expired) == (1, 0)
        queue.renew(claim)
