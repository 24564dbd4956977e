"""The answers of a claimant to workers of any kind."""

import asyncio
import socket
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from tailrace.config.queue_policies import FirstInConfig
from tailrace.config.queue_table import TableConfig, TaskConfig
from tailrace.errors import QueueClosed
from tailrace.transfer.queue.adapters import claimant as module
from tailrace.transfer.queue.adapters.claimant import Answer, Arrived, Claimant, Next, Over
from tailrace.transfer.queue.base import Claim, NewRow
from tailrace.transfer.queue.client.remote import RemoteQueue
from tailrace.transfer.queue.client.sync_queue import SyncQueue
from tailrace.transfer.queue.messages import Claimed, unpack
from tailrace.transfer.wire.messages import Failure
from tests.transfer.processes.served import LIMIT_S, Served, serving
from tests.transfer.tables import tokens

TABLE = TableConfig(tasks=(TaskConfig(name="actor", reads=("prompt_ids",), policy=FirstInConfig(max_rows=2)),))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("queue"), TABLE) as served:
        yield served


@contextmanager
def claiming(served: Served, task: str = "actor", rows: int | None = None) -> Iterator[Claimant]:
    queue = RemoteQueue(served.address, name="test", timeout_s=LIMIT_S)
    claimant = Claimant(queue, task, rows=rows, limit=None, rank=None)
    claimant.start()
    try:
        yield claimant
    finally:
        claimant.close()


class Worker:
    def __init__(self, claimant: Claimant) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(LIMIT_S)
        self._socket.connect(claimant.socket)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def ask(self, unfetched: int | None = None) -> None:
        self.send(msgspec.json.encode(Next(unfetched)) + b"\n")

    def say_arrived(self, lease_id: int) -> None:
        self.send(msgspec.json.encode(Arrived(lease_id)) + b"\n")

    def hear(self) -> Answer:
        answer: Answer = msgspec.json.decode(self._socket.recv(2**16), type=Answer)
        return answer


def put(queue: SyncQueue, start: int, count: int) -> None:
    orders = range(start, start + count)
    queue.put([NewRow(group_id=i, group_size=1, order=i, cells={"prompt_ids": tokens(1)}) for i in orders])


def orders(answer: Answer) -> list[int]:
    assert isinstance(answer, Claimed)
    found: list[int] = unpack(answer.rows, 4)[:, 3].tolist()
    return found


def ack(claimant: Claimant, served: Served, answer: Answer) -> None:
    assert isinstance(answer, Claimed)
    claim = served.queue.fetch("actor", answer)
    claimant.ack(claim, {row.id: {} for row in claim.rows})


def test_rows_that_were_not_fetched_are_wanted_again(shared: Served) -> None:
    put(shared.queue, 0, 3)
    with claiming(shared, rows=3) as claimant, Worker(claimant) as worker:
        worker.ask()
        lost = worker.hear()
        assert orders(lost) == [0, 1]
        assert isinstance(lost, Claimed)
        worker.ask(unfetched=lost.lease_id)
        again = worker.hear()
        assert orders(again) == [0, 1]
        worker.ask()
        last = worker.hear()
        assert orders(last) == [2]
        worker.ask()
        assert isinstance(worker.hear(), Over)
        for answer in (again, last):
            ack(claimant, shared, answer)
    assert shared.queue.stats().rows == 0


def test_a_worker_that_hangs_up_stands_in_no_line(shared: Served) -> None:
    with claiming(shared) as claimant, Worker(claimant) as second:
        with Worker(claimant) as first:
            first.ask()
            second.ask()
        put(shared.queue, 10, 1)
        answer = second.hear()
        assert orders(answer) == [10]
        ack(claimant, shared, answer)


def test_a_worker_that_is_killed_while_it_asks_harms_nobody(shared: Served) -> None:
    with claiming(shared) as claimant, Worker(claimant) as second:
        with Worker(claimant) as first:
            first.send(msgspec.json.encode(Next())[:-1])
        put(shared.queue, 50, 1)
        second.ask()
        answer = second.hear()
        assert orders(answer) == [50]
        ack(claimant, shared, answer)


def test_a_worker_that_waits_is_sent_away_at_the_end(shared: Served) -> None:
    with claiming(shared) as claimant:
        worker = Worker(claimant)
        worker.ask()
        while not shared.queue.stats().tasks["actor"].claims:
            pass
    with worker:
        assert isinstance(worker.hear(), Over)
    with pytest.raises(QueueClosed, match="data set was closed"):
        claimant.nack(Claim(lease_id=1, lease_s=1.0, task="actor", rows=()), None)
    assert shared.queue.stats().tasks["actor"].claims == 0


def test_what_has_not_arrived_when_its_worker_hangs_up_is_wanted_again(shared: Served) -> None:
    put(shared.queue, 30, 4)
    with claiming(shared, rows=4) as claimant:
        with Worker(claimant) as first:
            first.ask()
            arrived = first.hear()
            assert isinstance(arrived, Claimed)
            first.say_arrived(arrived.lease_id)
            assert first.hear() == Arrived(arrived.lease_id)
            first.ask()
            assert orders(first.hear()) == [32, 33]
        with Worker(claimant) as second:
            second.ask()
            again = second.hear()
            assert orders(again) == [32, 33]
            second.ask()
            assert isinstance(second.hear(), Over)
            for answer in (arrived, again):
                ack(claimant, shared, answer)


def test_rows_of_a_worker_that_dies_before_they_are_taken_back_go_back(
    shared: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(shared.queue, 40, 2)
    with claiming(shared, rows=2) as claimant:
        with Worker(claimant) as first:
            first.ask()
            lost = first.hear()
            assert isinstance(lost, Claimed)
            monkeypatch.setattr(module, "_PAUSE_S", LIMIT_S)
            first.ask(unfetched=lost.lease_id)
        with Worker(claimant) as second:
            second.ask()
            again = second.hear()
            assert orders(again) == [40, 41]
            ack(claimant, shared, again)


def test_who_acks_while_the_thread_ends_is_told(shared: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with claiming(shared) as claimant:

        def come_too_late(work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> Future[None]:
            claimant.close()
            return Future()

        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", come_too_late)
        with pytest.raises(QueueClosed, match="data set was closed"):
            claimant.nack(Claim(lease_id=1, lease_s=1.0, task="actor", rows=()), None)


def test_what_nobody_foresaw_is_raised_once_by_close(shared: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object, **__: object) -> Claimed:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(RemoteQueue, "lease", fail)
    with claiming(shared) as claimant, Worker(claimant) as worker:
        worker.ask()
        with pytest.raises(msgspec.DecodeError):
            worker.hear()
        with pytest.raises(ZeroDivisionError, match="a fault"):
            claimant.close()


def test_errors_of_the_queue_reach_the_worker(shared: Served) -> None:
    with claiming(shared, "critic") as claimant, Worker(claimant) as worker:
        worker.ask()
        failure = worker.hear()
        assert isinstance(failure, Failure)
        assert "no task 'critic'" in failure.text


def test_closing_twice_is_harmless_and_gives_back_what_was_not_acked(shared: Served) -> None:
    put(shared.queue, 20, 2)
    with claiming(shared) as claimant, Worker(claimant) as worker:
        worker.ask()
        assert orders(worker.hear()) == [20, 21]
        claimant.close()
        stats = shared.queue.stats().tasks["actor"]
        assert (stats.ready, stats.leased) == (2, 0)
