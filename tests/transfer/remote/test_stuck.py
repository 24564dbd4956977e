"""A stuck client keeps what it holds, and holds up no other client."""

from pathlib import Path

import numpy as np
import pytest

from tailrace.errors import QueueTimeout, StaleRowError
from tailrace.transfer.queue.messages import NO_VERSION, QUEUE, Admit, Admitted, Join, Joined, Run, Write, pack
from tailrace.transfer.wire.calls import Call, ask
from tailrace.transfer.wire.messages import Accepted
from tailrace.transfer.wire.sync import SyncClient
from tests.transfer.client.servers import LIMIT_S, TOKEN, serving
from tests.transfer.remote.clock import Clock
from tests.transfer.remote.faces import sync
from tests.transfer.tables import group, outputs, tokens

LEASE_S = 100.0


def test_a_consumer_that_never_acks_stalls_nobody(tmp_path: Path) -> None:
    clock = Clock()
    with (
        serving(tmp_path, clock=clock, lease_s=LEASE_S, unit_limit_s=1e6) as served,
        sync(served.address) as stuck,
        sync(served.address) as queue,
    ):
        for number in range(20):
            queue.put(group(number))
        held = stuck.claim("rollout")
        assert held.rows[0].order == 0
        for number in range(1, 20):
            claim = queue.claim("rollout", timeout=LIMIT_S)
            assert claim.rows[0].order == 100 * number
            queue.ack(claim, outputs(claim, response_ids=tokens(1)))
            claim = queue.claim("reward", timeout=LIMIT_S)
            queue.ack(claim, outputs(claim, reward=0.5))
        with pytest.raises(QueueTimeout, match="1 leased"):
            queue.claim("rollout", timeout=0)
        clock.jump(LEASE_S)
        assert queue.claim("rollout", timeout=LIMIT_S).rows[0].order == 0


def test_the_room_of_a_producer_that_never_writes_comes_back(tmp_path: Path) -> None:
    clock = Clock()
    numbers = pack(np.array([[1, 2, 1], [1, 2, 2]]))
    run = Run(2, ["prompt_ids"], pack(np.array([[1], [1]])))
    with (
        serving(tmp_path, clock=clock, lease_s=LEASE_S, unit_limit_s=1e6, max_rows=3) as served,
        SyncClient("stuck", TOKEN, QUEUE) as stuck,
        sync(served.address) as queue,
    ):
        admit = Admit(numbers, pack(np.array([NO_VERSION, NO_VERSION])), [run], 0, 0.0)
        admitted = stuck.run(ask(Call(served.address.endpoint, admit), Admitted))
        queue.put(group(2))  # there is room beside it
        assert queue.claim("rollout").rows[0].group_id == 2
        with pytest.raises(QueueTimeout, match="3 of 3 rows"):
            queue.put(group(3), timeout=0)
        clock.jump(LEASE_S)
        queue.put(group(3), timeout=LIMIT_S)
        queue.put(group(1), timeout=LIMIT_S)
        late = Call(served.units[0], Write(0, admitted.rows, [run], None), [tokens(2).data.cast("B")])
        with pytest.raises(StaleRowError):
            stuck.run(ask(late, Accepted))
        stats = queue.stats()
        assert (stats.rows, stats.tasks["rollout"].expired) == (3, 1)


def test_a_unit_that_cannot_be_reached_stalls_nobody(tmp_path: Path) -> None:
    join = Join("far", "1", False, ["tcp://127.0.0.1:9"], "", "", 2**20)
    with (
        serving(tmp_path, unit_limit_s=1e6) as served,
        SyncClient("far", TOKEN, QUEUE) as far,
        sync(served.address) as queue,
    ):
        far.run(ask(Call(served.address.endpoint, join), Joined))
        queue.put(group(1), timeout=LIMIT_S)
        assert queue.claim("rollout", timeout=LIMIT_S).rows[0].group_id == 1
        assert [unit.alive for unit in queue.stats().units] == [True, False]
