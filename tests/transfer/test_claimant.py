"""What a claimant answers to workers of any kind."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from tailrace.config.queue_table import FirstInConfig, TableConfig, TaskConfig
from tailrace.errors import QueueClosed
from tailrace.transfer.queue.base import Claim, NewRow
from tailrace.transfer.queue.claimant import Answer, Claimant, Next, Over
from tailrace.transfer.queue.client.remote import RemoteQueue
from tailrace.transfer.queue.client.sync_queue import SyncQueue
from tailrace.transfer.queue.wire.messages import Claimed, Failure, unpack
from tests.transfer.served import LIMIT_S, Served, serving
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

    def ask(self, unfetched: int | None = None) -> None:
        self._socket.sendall(msgspec.json.encode(Next(unfetched)) + b"\n")

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
