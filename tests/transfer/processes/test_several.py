"""A queue of two controllers in processes of its own: one address, and each part goes on by itself."""

import os
import signal
from pathlib import Path

import pytest

from tailrace.config.queue_policies import BalancedConfig
from tailrace.config.queue_table import AddedUnitConfig, TableConfig, TaskConfig
from tailrace.config.transfer import MemoryStorageConfig, ServiceQueueConfig
from tailrace.errors import GroupExists, QueueError, UserError
from tailrace.transfer.queue.adapters.dataset import StreamingDataset
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.client.look import read_stats
from tailrace.transfer.queue.client.sync_queue import SyncQueue
from tailrace.transfer.queue.processes import vitals
from tailrace.transfer.queue.processes.added import add_unit, remove_unit
from tailrace.transfer.queue.processes.several import queue_processes
from tests.transfer.processes.test_supervisor import LIMIT_S, TABLE
from tests.transfer.tables import group, outputs, tokens

TWO = ServiceQueueConfig(controllers=2, units=2, storage=MemoryStorageConfig(), max_rows=8)


def test_clients_reach_all_controllers_by_one_file_and_each_has_its_share(tmp_path: Path) -> None:
    with queue_processes(TWO, TABLE, tmp_path) as processes:
        assert set(processes.pids) == {"controller-0", "controller-1", "unit-0", "unit-1"}
        address = QueueAddress.read(processes.connection)
        assert address == processes.address
        with SyncQueue(address, name="test", timeout_s=LIMIT_S) as client:
            client.put([row for number in range(4) for row in group(number)])
            assert [read_stats(one, name="test", limit_s=LIMIT_S).rows for one in address.each] == [2, 2]
            with pytest.raises(QueueError, match=r"can never fit queue\.max_rows 4"):
                client.put(group(6, 5))
            for _ in range(4):
                claim = client.claim("rollout")
                client.ack(claim, outputs(claim, response_ids=tokens(3)))
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes.pids.values())


def test_a_killed_controller_comes_back_while_the_other_goes_on(tmp_path: Path) -> None:
    with (
        queue_processes(TWO, TABLE, tmp_path) as processes,
        SyncQueue(processes.address, name="test", timeout_s=LIMIT_S) as client,
    ):
        client.put([row for number in range(4) for row in group(number)])
        os.kill(killed := processes.pids["controller-1"], signal.SIGKILL)
        seen = []
        for _ in range(4):
            claim = client.claim("rollout")
            client.ack(claim, outputs(claim, response_ids=tokens(3)))
            seen += [row.group_id for row in claim.rows]
        assert sorted(seen) == [0, 1, 2, 3]
        assert processes.pids["controller-1"] != killed


def test_a_queue_is_served_again_with_as_many_controllers_as_before(tmp_path: Path) -> None:
    with queue_processes(TWO, TABLE, tmp_path, resume=True) as processes:
        before = processes.address
        with SyncQueue(before, name="test", timeout_s=LIMIT_S) as client:
            client.put([*group(0), *group(1)])
    for controllers in (1, 4):
        other = TWO.model_copy(update={"controllers": controllers, "units": 4})
        with (
            pytest.raises(UserError, match=rf"queue\.controllers=2, and this one has {controllers}"),
            queue_processes(other, TABLE, tmp_path, resume=True),
        ):
            pass
    with queue_processes(TWO, TABLE, tmp_path, resume=True) as processes:
        assert processes.address == before
        with SyncQueue(before, name="test", timeout_s=LIMIT_S) as client:
            assert client.lost_groups().keys() <= {0, 1}
            assert client.stats().lost_groups == 2


def test_a_unit_joins_the_controller_with_the_least_room_and_leaves_it(tmp_path: Path) -> None:
    with (
        queue_processes(TWO, TABLE, tmp_path) as processes,
        SyncQueue(processes.address, name="test", timeout_s=LIMIT_S) as client,
    ):
        client.put(group(1, prompt=2000))
        config = AddedUnitConfig(storage=MemoryStorageConfig())
        with add_unit(processes.address, config, log=tmp_path / "added.log", name="added"):
            names = [
                [unit.name for unit in read_stats(one, name="test", limit_s=LIMIT_S).units]
                for one in processes.address.each
            ]
            assert names == [["unit-0"], ["unit-1", "added"]]
            client.put(group(3, prompt=2000))
            assert {unit.name: unit.rows for unit in client.stats().units} == {"unit-0": 0, "unit-1": 1, "added": 1}
            with pytest.raises(UserError, match="no unit 'unit-9'; its units are unit-0, unit-1, added"):
                remove_unit(processes.address, "unit-9", limit_s=LIMIT_S)
            remove_unit(processes.address, "added", limit_s=LIMIT_S)
        assert {unit.name: unit.rows for unit in client.stats().units} == {"unit-0": 0, "unit-1": 2}
        for _ in range(2):
            claim = client.claim("rollout")
            client.ack(claim, outputs(claim, response_ids=tokens(1)))
            claim = client.claim("sink")
            client.ack(claim, outputs(claim))
        with pytest.raises(GroupExists):
            client.put(group(1, prompt=2000))


def test_the_whole_queue_is_given_up_with_one_of_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitals, "MAX_DEATHS", 0)
    told: list[bool] = []
    processes = queue_processes(TWO, TABLE, tmp_path)
    processes.on_given_up(lambda: told.append(True))

    def serve() -> None:
        with processes:
            os.kill(processes.pids["unit-1"], signal.SIGKILL)
            processes.wait()

    with pytest.raises(QueueError, match="unit-1"):
        serve()
    assert told == [True]
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes.pids.values())


def test_a_part_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "shard-1").write_text("in the way")
    with pytest.raises(UserError, match="shard-1"), queue_processes(TWO, TABLE, tmp_path):
        pass


def test_what_needs_one_controller_is_refused_in_one_line(tmp_path: Path) -> None:
    task = TaskConfig(name="only", reads=("prompt_ids", "response_ids"), policy=BalancedConfig(ranks=2, rows=4))
    with (
        pytest.raises(QueueError, match=r"policy 'balanced' .* queue\.controllers is 2; give 1"),
        queue_processes(TWO, TableConfig(tasks=(task,)), tmp_path),
    ):
        pass
    address = QueueAddress(endpoints=["ipc://a"], host="here", token=b"token" * 8, others=[["ipc://b"]])
    with pytest.raises(UserError, match=r"needs queue\.controllers=1; the queue has 2"):
        StreamingDataset(address, "only")
