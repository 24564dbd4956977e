"""Both clients, blocking and asynchronous, against a controller and units with sockets and shared memory."""

import asyncio
import gc
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Semaphore
from typing import Any, TypeVar

import numpy as np
import pytest

from tailrace.errors import (
    ColumnError,
    GroupExists,
    LeaseError,
    PeerLost,
    QueueClosed,
    QueueError,
    QueueTimeout,
    StaleRowError,
    StorageFull,
)
from tailrace.transfer.queue.base import Claim, NewRow, RowId
from tailrace.transfer.queue.client import one
from tailrace.transfer.queue.client.remote import RemoteQueue
from tailrace.transfer.queue.client.session import Session
from tailrace.transfer.queue.client.sync_queue import SyncQueue
from tailrace.transfer.queue.messages import QUEUE, Renew
from tailrace.transfer.queue.policies.first_in import FirstIn
from tailrace.transfer.queue.rows.table import QueueTask
from tailrace.transfer.wire.calls import Operation
from tailrace.transfer.wire.server import Server
from tailrace.types import FloatArray, TaskSpec, Value
from tests.helpers.waiting import until
from tests.transfer.client.servers import LIMIT_S, TOKEN, Make, Served, arena, memory, serving
from tests.transfer.tables import group, one_task, outputs, table, tokens
from tests.transfer.wire import desk

T = TypeVar("T")

LONG = 20_000
"""The tokens of a cell that passes through shared memory, if there is any."""


class Awaited:
    """A `RemoteQueue` whose calls block."""

    def __init__(self, served: Served, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self._queue = self._runner.run(self._enter(served, options))

    async def _enter(self, served: Served, options: dict[str, Any]) -> RemoteQueue:
        return await RemoteQueue(served.address, name="tester", **options).__aenter__()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Coroutine[Any, Any, Any]] = getattr(self._queue, name)
        return lambda *args, **options: self._runner.run(method(*args, **options))

    def __enter__(self) -> "Awaited":
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.run(self._queue.__aexit__(None, None, None))
        self._runner.close()


def blocking(served: Served, **options: Any) -> SyncQueue:
    return SyncQueue(served.address, name="tester", **options)


Face = Callable[..., Any]


@pytest.fixture(params=[blocking, Awaited], ids=["sync", "async"])
def face(request: pytest.FixtureRequest) -> Face:
    chosen: Face = request.param
    return chosen


def whole_rows(queue: Any, served_task: str = "rollout", **cells: Value) -> Claim:
    claim: Claim = queue.claim(served_task, timeout=LIMIT_S)
    queue.ack(claim, outputs(claim, **cells))
    return claim


def test_cells_of_every_kind_pass_through_the_queue(tmp_path: Path, make: Make, face: Face) -> None:
    columns = ("prompt_ids", "rollout_log_probs", "prompt", "metadata", "seed", "reward")
    tasks = (QueueTask(TaskSpec(name="only", reads=columns), FirstIn(4)),)
    log_probs: FloatArray = np.linspace(-1, 0, LONG, dtype=np.float32)
    cells: list[dict[str, Value]] = [
        {
            "prompt_ids": tokens(length),
            "rollout_log_probs": log_probs[:length],
            "prompt": "é" * (length % 7),
            "metadata": {"length": [length, None]},
            "seed": -length,
            "reward": length / 3,
        }
        for length in (LONG, 0, 3, 1)
    ]
    with serving(tmp_path, make=make, tasks=tasks) as served, face(served) as queue:
        ids = queue.put([NewRow(group_id=1, group_size=4, order=n, cells=own) for n, own in enumerate(cells)])
        claim = queue.claim("only", timeout=LIMIT_S)
        assert [row.id for row in claim.rows] == ids
        for row, own in zip(claim.rows, cells, strict=True):
            assert list(row.cells) == list(columns)
            for column, value in own.items():
                np.testing.assert_equal(row.cells[column], value)
                assert type(row.cells[column]) is type(value)
        array = claim.rows[0].cells["prompt_ids"]
        assert isinstance(array, np.ndarray)
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
        queue.ack(claim, outputs(claim))
        stats = queue.stats()
        assert (stats.rows, stats.bytes, stats.tasks["only"].consumed) == (0, 0, 4)


def test_rows_pass_from_task_to_task(tmp_path: Path, make: Make, face: Face) -> None:
    with serving(tmp_path, make=make, units=2) as served, face(served) as queue:
        queue.put(group(0, 2, prompt=LONG))
        for _ in range(2):
            whole_rows(queue, response_ids=tokens(LONG + 1))
        whole_rows(queue, "reward", reward=0.5)
        claim = queue.claim("actor", limit=2, timeout=LIMIT_S)
        assert [row.order for row in claim.rows] == [0, 1]
        for row in claim.rows:
            np.testing.assert_array_equal(row.cells["prompt_ids"], tokens(LONG))
            np.testing.assert_array_equal(row.cells["response_ids"], tokens(LONG + 1))
            assert row.cells["reward"] == 0.5
        queue.ack(claim, outputs(claim))
        assert queue.stats().rows == 0


def test_the_memory_of_rows_that_left_is_freed_when_nobody_looks_at_it(tmp_path: Path, face: Face) -> None:
    with serving(tmp_path, tasks=one_task(FirstIn(1))) as served, face(served) as queue:
        queue.put(group(0, prompt=LONG))
        view = whole_rows(queue, "only").rows[0].cells["prompt_ids"]
        assert isinstance(view, np.ndarray)
        view = view[5:].reshape(-1, 5)
        queue.stats()
        np.testing.assert_array_equal(view, tokens(LONG)[5:].reshape(-1, 5))
        assert served.storages[0].nbytes >= 8 * LONG
        del view
        gc.collect()
        until(lambda: queue.stats() is not None and not served.storages[0].nbytes)  # the pin goes back with it


def test_bad_calls_are_the_same_errors_as_in_one_process(tmp_path: Path, face: Face) -> None:
    with serving(tmp_path, max_rows=4, max_bytes=1000) as served, face(served) as queue:
        with pytest.raises(ColumnError, match="row 7 of group 1 lacks column 'prompt_ids'"):
            queue.put([NewRow(group_id=1, group_size=1, order=7, cells={})])
        with pytest.raises(ColumnError, match="brings column 'reward', which a task writes"):
            queue.put([NewRow(group_id=1, group_size=1, order=7, cells={"prompt_ids": tokens(1), "reward": 0.5})])
        with pytest.raises(ColumnError, match="expected a 1-D int64 array"):
            queue.put([NewRow(group_id=1, group_size=1, order=7, cells={"prompt_ids": "text"})])
        with pytest.raises(QueueError, match="group 1 says group_size 3, but 2 of its rows were put"):
            queue.put(group(1, 3)[:2])
        with pytest.raises(QueueError, match=r"can never fit queue\.max_rows 4"):
            queue.put(group(1, 5))
        with pytest.raises(QueueError, match="no task 'critic' in the table"):
            queue.claim("critic")
        with pytest.raises(QueueError, match="limit must be at least 1, got 0"):
            queue.claim("rollout", limit=0)
        queue.put(group(1))
        with pytest.raises(GroupExists, match="group 1 is in the queue already"):
            queue.put(group(1))
        with pytest.raises(QueueTimeout, match="of 1000 bytes are taken"):
            queue.put(group(2, 4), timeout=0.01)
        with pytest.raises(QueueTimeout, match="claim of task 'reward' waited"):
            queue.claim("reward", timeout=0)
        claim = queue.claim("rollout", timeout=LIMIT_S)
        with pytest.raises(ColumnError, match=r"missing: \['response_ids'\], not its own: \['reward'\]"):
            queue.ack(claim, outputs(claim, reward=0.5))
        with pytest.raises(StaleRowError):
            queue.ack(claim, {RowId(99, 0): {"response_ids": tokens(1)}})
        queue.renew(claim)
        queue.nack(claim)
        with pytest.raises(LeaseError):
            queue.ack(claim, outputs(claim, response_ids=tokens(1)))
        with pytest.raises(LeaseError):
            queue.renew(claim)
        assert queue.stats().tasks["rollout"].ready == 1


def test_a_row_that_is_acked_with_another_part_of_its_claim_stays_leased(tmp_path: Path, face: Face) -> None:
    with serving(tmp_path, tasks=table(FirstIn(2))) as served, face(served) as queue:
        queue.put(group(1, 2))
        claim = queue.claim("rollout", limit=2, timeout=LIMIT_S)
        part = replace(claim, rows=claim.rows[:1])
        with pytest.raises(LeaseError, match="is acked with a claim that it is not in"):
            queue.ack(part, outputs(claim, response_ids=tokens(1)))
        queue.ack(claim, outputs(claim, response_ids=tokens(1)))
        assert queue.stats().tasks["rollout"].consumed == 2


async def put_that_waits(served: Served) -> None:
    cells: dict[str, Value] = {"prompt_ids": tokens(LONG)}
    row = NewRow(group_id=1, group_size=1, order=1, cells=cells, not_before=1)
    async with (
        RemoteQueue(served.address, name="patient") as queue,
        asyncio.timeout(5.0),
    ):  # less than the time to a sign of life
        task = asyncio.create_task(queue.put([row], timeout=LIMIT_S))
        while not (await queue.stats()).blocked_puts:
            pass
        while served.storages[0].nbytes:
            await queue.stats()
        await queue.advance(1)
        await task


def test_a_put_that_waits_takes_no_room_in_the_memory_of_a_unit(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        asyncio.run(put_that_waits(served))


def test_rows_wait_for_their_weight_version_and_everyone_leaves_when_the_queue_closes(
    tmp_path: Path, face: Face
) -> None:
    row = NewRow(group_id=1, group_size=1, order=1, cells={"prompt_ids": tokens(1)}, not_before=3)
    with serving(tmp_path) as served, face(served) as queue:
        with pytest.raises(QueueTimeout, match="version 3"):
            queue.put([row], timeout=0.01)
        queue.advance(3)
        queue.put([row])
        with pytest.raises(QueueTimeout):
            queue.lost_groups(timeout=0.01)
        queue.close()
        with pytest.raises(QueueClosed):
            queue.claim("rollout")
        with pytest.raises(QueueClosed):
            queue.lost_groups()


def test_a_queue_goes_on_from_its_snapshot(tmp_path: Path, make: Make, face: Face) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with serving(tmp_path / "first", make=make, units=2) as served, face(served) as queue:
        queue.put(group(0, 2, prompt=LONG))
        queue.put(group(1, 3))
        whole_rows(queue, response_ids=tokens(5))
        queue.claim("rollout", timeout=LIMIT_S)
        data = queue.snapshot()
    with serving(tmp_path / "second", make=make, units=2) as served, face(served) as queue:
        queue.restore(data)
        claims = [whole_rows(queue, response_ids=tokens(6)) for _ in range(4)]
        assert [row.order for claim in claims for row in claim.rows] == [1, 100, 101, 102]
        np.testing.assert_array_equal(claims[0].rows[0].cells["prompt_ids"], tokens(LONG))
        rewarded = queue.claim("reward", timeout=LIMIT_S)
        assert [len(row.cells["response_ids"]) for row in rewarded.rows] == [5, 6]
        with pytest.raises(QueueError):
            queue.restore(data)
        with pytest.raises(QueueError, match="not a snapshot"):
            queue.restore(b"no snapshot")


def test_rows_survive_a_unit_that_dies_where_another_has_them(tmp_path: Path) -> None:
    with serving(tmp_path, units=2, replicas=2, unit_limit_s=3.0) as served, blocking(served, limit_s=2.0) as queue:
        queue.put(group(0, 2, prompt=LONG))
        first = queue.claim("rollout", timeout=LIMIT_S)
        assert sorted(first.rows[0].units) == [0, 1]
        [left] = [unit.number for unit in queue.stats().units if unit.name == "unit-1"]
        served.stop_unit(0)
        queue.ack(first, outputs(first, response_ids=tokens(3)))
        whole_rows(queue, response_ids=tokens(4))
        claim = whole_rows(queue, "reward", reward=0.5)
        assert [len(row.cells["response_ids"]) for row in claim.rows] == [3, 4]  # type: ignore[arg-type]
        queue.put(group(1, 1, prompt=LONG))
        assert queue.claim("rollout", timeout=LIMIT_S).rows[0].units == (left,)


def test_a_dead_unit_holds_up_nobody_until_the_limit(tmp_path: Path, face: Face) -> None:
    """The limits are longer than any test."""
    with serving(tmp_path, units=2, replicas=2, unit_limit_s=3.0) as served, face(served, limit_s=3600.0) as queue:
        queue.put(group(0, 3))
        first, second = (queue.claim("rollout", timeout=LIMIT_S) for _ in range(2))
        served.stop_unit(0)
        queue.ack(first, outputs(first, response_ids=tokens(3)))
        whole_rows(queue, response_ids=tokens(4))
        served.stop_unit(1)
        with pytest.raises(StaleRowError):
            queue.ack(second, outputs(second, response_ids=tokens(5)))
        assert queue.lost_groups(timeout=LIMIT_S) == {0: 0}


@pytest.mark.parametrize("token", [TOKEN, b"another token of some length"], ids=["own token", "another token"])
def test_a_server_that_listens_where_a_unit_did_is_not_taken_for_it(tmp_path: Path, face: Face, token: bytes) -> None:
    alone = ("tcp://127.0.0.1:*",)
    with serving(tmp_path, endpoints=alone, units=1, unit_limit_s=3.0) as served, face(served, limit_s=3600.0) as queue:
        queue.put(group(0, 1))
        claim = queue.claim("rollout", timeout=LIMIT_S)
        served.stop_unit(0)
        other = Server("other", token, QUEUE, endpoints=served.units)
        with desk.serving(other, takes_all := desk.Desk(other)), pytest.raises(StaleRowError):
            queue.ack(claim, outputs(claim, response_ids=tokens(5)))
        assert not takes_all.parts


def test_groups_that_went_with_a_unit_are_put_again(tmp_path: Path) -> None:
    with serving(tmp_path, units=2, unit_limit_s=3.0) as served, blocking(served, limit_s=2.0) as queue:
        queue.put(group(0, 2))
        queue.put(group(1, 2))
        served.stop_unit(0)
        lost = queue.lost_groups(timeout=LIMIT_S)
        assert 0 < len(lost) < 3
        for number in lost:
            queue.put(group(number, 2))
        claims = [whole_rows(queue, response_ids=tokens(1)) for _ in range(4)]
        assert sorted(row.order for claim in claims for row in claim.rows) == [0, 1, 100, 101]
        assert queue.stats().lost_groups == 0


def test_a_servers_silence_ends_a_call_soon_after_its_limit(tmp_path: Path, face: Face) -> None:
    with serving(tmp_path) as served:
        pass
    with face(served, limit_s=0.2) as queue:
        with pytest.raises(PeerLost):
            queue.stats()
        with pytest.raises(PeerLost):
            queue.claim("rollout", timeout=0.1)


async def test_a_cancelled_claim_or_put_has_done_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        async with asyncio.timeout(LIMIT_S), RemoteQueue(served.address, name="tester") as queue:
            for turns in range(60):
                doomed = asyncio.create_task(queue.put(group(turns, prompt=LONG)))
                for _ in range(turns):
                    await asyncio.sleep(0)
                doomed.cancel()
                await asyncio.wait([doomed])
            while (await queue.stats()).rows:
                claim = await queue.claim("rollout")
                again = asyncio.create_task(queue.claim("rollout"))
                await asyncio.sleep(0)
                again.cancel()
                await asyncio.wait([again])
                await queue.ack(claim, outputs(claim, response_ids=tokens(1)))
                claim = await queue.claim("reward")
                await queue.ack(claim, outputs(claim, reward=0.5))
                claim = await queue.claim("actor", limit=1)
                await queue.ack(claim, outputs(claim))
            stats = await queue.stats()
            assert (stats.rows, stats.bytes) == (0, 0)


async def test_a_claim_is_held_while_its_work_takes_longer_than_the_lease(tmp_path: Path) -> None:
    with serving(tmp_path, lease_s=3.0) as served:
        async with asyncio.timeout(LIMIT_S), RemoteQueue(served.address, name="tester") as queue:
            await queue.put(group(0))
            async with queue.held(await queue.claim("rollout")) as claim:
                with pytest.raises(QueueTimeout):
                    await queue.claim("rollout", timeout=4.0)
                await queue.ack(claim, outputs(claim, response_ids=tokens(1)))
            assert (await queue.stats()).tasks["rollout"].expired == 0


def test_a_blocking_client_holds_its_claim_by_a_thread(tmp_path: Path) -> None:
    with serving(tmp_path, lease_s=3.0) as served, blocking(served) as queue, blocking(served) as other:
        queue.put(group(0))
        with queue.held(queue.claim("rollout")) as claim:
            with pytest.raises(QueueTimeout):
                other.claim("rollout", timeout=4.0)
            queue.ack(claim, outputs(claim, response_ids=tokens(1)))
        queue.put(group(1))
        with queue.held(queue.claim("rollout")) as claim:
            pass
        assert other.claim("rollout", timeout=LIMIT_S).rows[0].id == claim.rows[0].id, "it was given back"


def test_a_claim_is_held_by_a_client_whose_own_connection_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listen = partial(Server, silence_s=0.5, signs_of_life=True)  # as if the connection itself were gone
    renewed = Semaphore(0)

    def renew(session: Session, lease_id: int) -> Operation[None]:
        yield from session.tell(Renew(lease_id))
        renewed.release()

    monkeypatch.setattr(one, "renew_lease", renew)
    with serving(tmp_path, lease_s=3.0, listen=listen) as served, blocking(served) as queue:
        queue.put(group(0))
        with queue.held(queue.claim("rollout")) as claim:
            for _ in range(2):
                assert renewed.acquire(timeout=LIMIT_S)
            queue.ack(claim, outputs(claim, response_ids=tokens(1)))
        assert queue.stats().tasks["rollout"].expired == 0


def test_a_queue_that_is_lost_does_not_hide_how_the_work_of_a_blocking_client_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(claim: Claim) -> None:
        raise PeerLost("no answer")

    with serving(tmp_path) as served, blocking(served) as queue:
        queue.put(group(0))
        monkeypatch.setattr(queue, "nack", lost)
        with pytest.raises(ZeroDivisionError), queue.held(queue.claim("rollout")):
            raise ZeroDivisionError


async def test_a_client_that_is_cancelled_while_it_hangs_up_leaves_nothing_open(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        queue = RemoteQueue(served.address, name="tester")
        async with queue:
            await queue.stats()
            leaving = asyncio.create_task(queue.__aexit__(None, None, None))
            await asyncio.sleep(0)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            with pytest.raises(QueueClosed):
                await queue.stats()


async def test_a_client_that_leaves_gives_its_rows_back_before_the_lease_ends(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        async with asyncio.timeout(LIMIT_S), RemoteQueue(served.address, name="next") as queue:
            await queue.put(group(0))
            async with RemoteQueue(served.address, name="gone", limit_s=0.3) as gone:
                await gone.claim("rollout")
            claim = await queue.claim("rollout")
            assert [row.order for row in claim.rows] == [0]
            assert (await queue.stats()).tasks["rollout"].expired == 1


def test_outputs_that_the_units_have_no_room_for_are_an_error_that_says_so(tmp_path: Path) -> None:
    with serving(tmp_path, make=memory) as served, blocking(served, timeout_s=0.1) as queue:
        queue.put(group(0, prompt=2**22))
        claim = queue.claim("rollout")
        with pytest.raises(StorageFull, match=f"no room for a write of {2**25 + 8} bytes"):
            queue.ack(claim, outputs(claim, response_ids=tokens(2**22 + 1)))
        with pytest.raises(QueueError, match=r"80000000 bytes can never fit .* raise queue.storage.max_bytes"):
            queue.ack(claim, outputs(claim, response_ids=tokens(10_000_000)))
        queue.ack(claim, outputs(claim, response_ids=tokens(1)))


def test_a_queue_that_stops_as_soon_as_it_has_started_leaves_nothing_open(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / str(number)).mkdir()
        with serving(tmp_path / str(number)):
            pass


def test_without_shared_memory_cells_come_in_messages(tmp_path: Path) -> None:
    tasks = one_task(FirstIn(1))
    with serving(tmp_path, make=arena, tasks=tasks) as served, blocking(served, shared_memory=False) as queue:
        queue.put(group(0, prompt=LONG))
        claim = whole_rows(queue, "only")
        until(lambda: queue.stats() is not None and not served.storages[0].nbytes)
        np.testing.assert_array_equal(claim.rows[0].cells["prompt_ids"], tokens(LONG))
