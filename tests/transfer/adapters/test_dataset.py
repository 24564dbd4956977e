"""A data set delivers every row once, whichever process fetches it, and rows that were not acked go back."""

import multiprocessing
import os
import select
import signal
import socket
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tailrace.config.queue_policies import FirstInConfig
from tailrace.config.queue_table import TableConfig, TaskConfig
from tailrace.errors import ColumnError, LeaseError, QueueClosed, QueueError, QueueTimeout
from tailrace.transfer.queue.adapters import dataset as module
from tailrace.transfer.queue.adapters.dataset import StreamingDataset
from tailrace.transfer.queue.adapters.tensors import PackedTensor, Pad, PaddedTensor, TensorBatch
from tailrace.transfer.queue.base import NewRow
from tailrace.transfer.queue.client.sync_queue import SyncQueue
from tailrace.types import Value
from tests.transfer.processes.served import LIMIT_S, Served, serving
from tests.transfer.tables import tokens

TABLE = TableConfig(
    tasks=(
        TaskConfig(name="rollout", reads=("prompt_ids", "seed"), writes=("reward",), policy=FirstInConfig(max_rows=4)),
        TaskConfig(name="sink", reads=("reward",), policy=FirstInConfig(max_rows=100)),
    )
)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path, TABLE) as served:
        yield served


def put(queue: SyncQueue, count: int) -> None:
    """Put rows whose prompts and seeds follow from their order."""
    cells: list[dict[str, Value]] = [{"prompt_ids": tokens(1 + order % 5), "seed": order} for order in range(count)]
    queue.put([NewRow(group_id=order, group_size=1, order=order, cells=own) for order, own in enumerate(cells)])


def dataset(served: Served, **options: Any) -> StreamingDataset:
    return StreamingDataset(served.address, "rollout", **{"timeout_s": LIMIT_S, **options})


def orders(batch: TensorBatch) -> list[int]:
    """The orders of the rows, checked against their cells."""
    found = [row.order for row in batch.claim.rows]
    assert isinstance(batch.columns["seed"], torch.Tensor)
    assert batch.columns["seed"].tolist() == found
    prompts = batch.columns["prompt_ids"]
    assert isinstance(prompts, PackedTensor)
    assert [prompt.tolist() for prompt in prompts.split()] == [list(range(1 + order % 5)) for order in found]
    return found


def rewards(batch: TensorBatch) -> dict[str, torch.Tensor]:
    return {"reward": torch.tensor([float(row.order) for row in batch.claim.rows], dtype=torch.float64)}


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize(("workers", "context"), [(0, None), (1, "fork"), (3, "fork"), (1, "spawn")])
def test_every_row_is_delivered_once(served: Served, workers: int, context: str | None) -> None:
    put(served.queue, 30)
    with dataset(served, rows=26, limit=3) as rows:
        seen = []
        for batch in DataLoader(
            rows, batch_size=None, num_workers=workers, multiprocessing_context=context, in_order=False
        ):
            assert 1 <= len(batch.claim.rows) <= 3
            seen += orders(batch)
            rows.ack(batch, rewards(batch))
    assert sorted(seen) == list(range(26))
    stats = served.queue.stats().tasks["rollout"]
    assert (stats.consumed, stats.ready, stats.leased, stats.expired) == (26, 4, 0, 0)
    claim = served.queue.claim("sink", limit=100)
    assert all(row.cells["reward"] == row.order for row in claim.rows)


def test_rows_that_come_while_workers_wait_are_delivered_until_the_queue_is_closed(served: Served) -> None:
    with dataset(served) as rows:
        seen = []
        iterator = iter(DataLoader(rows, batch_size=None, num_workers=2, in_order=False))
        put(served.queue, 8)
        for batch in iterator:
            seen += orders(batch)
            rows.ack(batch, rewards(batch))
            if len(seen) == 8:
                served.queue.close()
    assert sorted(seen) == list(range(8))


@pytest.mark.parametrize("workers", [0, 2])
def test_what_was_not_acked_goes_back_at_the_end_of_the_block(served: Served, workers: int) -> None:
    put(served.queue, 40)
    with dataset(served) as rows:
        for batch in DataLoader(rows, batch_size=None, num_workers=workers, in_order=False):
            rows.ack(batch, rewards(batch))
            break
        kept = next(iter(DataLoader(rows, batch_size=None)))
    stats = served.queue.stats().tasks["rollout"]
    assert (stats.consumed, stats.leased, stats.ready) == (4, 0, 36)
    with pytest.raises(QueueClosed, match="data set was closed"):
        rows.ack(kept, rewards(kept))


@pytest.mark.parametrize("rows", [40, None])
def test_what_workers_have_fetched_ahead_is_delivered_by_the_next_loop(served: Served, rows: int | None) -> None:
    put(served.queue, 40)
    seen: list[int] = []
    with dataset(served, rows=rows) as data:
        loader = DataLoader(data, batch_size=None, num_workers=2, in_order=False)
        kept = next(iter(loader))
        seen += orders(kept)
        for batch in loader:
            seen += orders(batch)
            data.ack(batch, rewards(batch))
            if len(seen) == 40:
                data.close() if rows is None else data.ack(kept, rewards(kept))
    assert sorted(seen) == list(range(40))
    assert served.queue.stats().tasks["rollout"].consumed == (40 if rows else 36)


def test_a_loop_that_ends_by_itself_delivers_what_workers_had_fetched_before_they_ended(served: Served) -> None:
    put(served.queue, 24)
    with dataset(served, rows=24) as data:
        batches = list(DataLoader(data, batch_size=None, num_workers=2, prefetch_factor=4, in_order=False))
        assert sorted(order for batch in batches for order in orders(batch)) == list(range(24))
        for batch in batches:
            data.ack(batch, rewards(batch))
    assert served.queue.stats().tasks["rollout"].consumed == 24


def test_a_worker_that_connects_while_the_data_set_closes_gets_no_rows(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WATCH_S", 0.01)
    with dataset(served) as data, socket.socket(socket.AF_UNIX) as desk, ThreadPoolExecutor(1) as thread:
        data._socket += "-that-accepts-nobody"
        desk.bind(data._socket)
        desk.listen()
        found = thread.submit(lambda: list(data))
        assert select.select([desk], [], [], LIMIT_S)[0], "it has not connected"
        os.unlink(data._socket)
        assert found.result(LIMIT_S) == []


# PyTorch tells a lack of file descriptors from other errors by opening files, which the garbage collector closes.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_the_rows_of_a_killed_worker_go_back(served: Served) -> None:
    put(served.queue, 40)
    seen: list[int] = []
    with pytest.raises((RuntimeError, EOFError, ConnectionError)):  # whichever error PyTorch meets first
        train(served, seen, kill=True)
    assert 4 <= len(seen) < 40
    train(served, seen, rows=40 - len(seen))
    assert sorted(seen) == list(range(40))
    assert served.queue.stats().tasks["rollout"].consumed == 40


def train(served: Served, seen: list[int], *, kill: bool = False, **options: Any) -> None:
    """Ack all batches. `kill`: kill the worker after the first batch."""
    with dataset(served, **options) as rows:
        batches = iter(DataLoader(rows, batch_size=None, num_workers=1))
        for batch in batches:
            rows.ack(batch, rewards(batch))
            seen += orders(batch)
            if kill:
                os.kill(batches._workers[0].pid, signal.SIGKILL)  # type: ignore[attr-defined]
                kill = False


def test_leases_are_renewed_while_batches_wait(tmp_path: Path) -> None:
    with serving(tmp_path, TABLE, lease_s=3.0) as served:
        put(served.queue, 4)
        with dataset(served) as rows:
            batch = next(iter(DataLoader(rows, batch_size=None)))
            with pytest.raises(QueueTimeout):
                served.queue.claim("rollout", timeout=4.0)  # longer than the lease, so it was renewed
            rows.ack(batch, rewards(batch))


def test_a_batch_is_given_back_or_acked_once(served: Served) -> None:
    put(served.queue, 4)
    with dataset(served) as rows:
        batches = iter(DataLoader(rows, batch_size=None))
        batch = next(batches)
        rows.nack(batch, [batch.claim.rows[0].id])
        with pytest.raises(LeaseError):
            rows.ack(batch, rewards(batch))
        rows.nack(batch)
        again = next(batches)
        rows.ack(again, rewards(again))


def test_a_worker_says_why_it_gets_no_rows(served: Served) -> None:
    with dataset(served, timeout_s=0.1) as rows:
        batches = iter(DataLoader(rows, batch_size=None, num_workers=1))
        with pytest.raises(QueueTimeout, match=r"claim of task 'rollout' waited") as caught:
            next(batches)
        traceback.clear_frames(caught.tb)  # PyTorch's error holds its loader, and with it the worker


def test_the_rows_of_a_process_that_dies_go_back_when_it_is_not_heard_of(served: Served) -> None:
    put(served.queue, 4)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=train_for_ever, args=(served, theirs))
    process.start()
    theirs.close()  # so that the end of the process is noticed
    assert ours.poll(LIMIT_S)
    assert ours.recv_bytes() == b"it has them"
    process.kill()
    process.join(LIMIT_S)
    assert len(served.queue.claim("rollout").rows) == 4


def train_for_ever(served: Served, told: Connection) -> None:
    with dataset(served, limit_s=1.0) as rows:
        batches = iter(DataLoader(rows, batch_size=None, num_workers=1))
        assert len(next(batches).claim.rows) == 4
        told.send_bytes(b"it has them")
        threading.Event().wait(LIMIT_S)


def test_columns_come_as_they_are_asked_for(served: Served) -> None:
    put(served.queue, 4)
    with dataset(served, rows=4, layouts={"prompt_ids": Pad(-1, side="left")}) as rows:
        batch = next(iter(DataLoader(rows, batch_size=None, num_workers=1)))
        padded = batch.columns["prompt_ids"]
        assert isinstance(padded, PaddedTensor)
        assert padded.values.tolist() == [[-1, -1, -1, 0], [-1, -1, 0, 1], [-1, 0, 1, 2], [0, 1, 2, 3]]
    with dataset(served, rows=4, layouts={"prompt_ids": "nested"}) as rows:
        nested = next(iter(DataLoader(rows, batch_size=None, num_workers=1))).columns["prompt_ids"]
        assert isinstance(nested, torch.Tensor)
        assert nested.is_nested
        assert nested.offsets().tolist() == [0, 1, 3, 6, 10]  # type: ignore[attr-defined]


def test_what_cannot_be_had_is_refused_at_the_start(served: Served) -> None:
    for options, error, message in (
        ({"layouts": {"seed": "nested"}}, ColumnError, "'seed', which holds int; only arrays"),
        ({"layouts": {"prompt_id": "nested"}}, ColumnError, "does not read.*did you mean 'prompt_ids'"),
    ):
        with pytest.raises(error, match=message), dataset(served, **options):
            pass
    with pytest.raises(QueueError, match="no task 'rollouts'"), StreamingDataset(served.address, "rollouts"):
        pass
    with pytest.raises(QueueError, match="inside its block"):
        next(iter(dataset(served)))
    with pytest.raises(QueueError, match="at least 1"):
        dataset(served, limit=0)
