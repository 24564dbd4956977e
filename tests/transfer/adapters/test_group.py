"""Ranks of a real process group all get what one of them claims."""

import multiprocessing
import re
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from tailrace.config.queue_policies import FirstInConfig
from tailrace.config.queue_table import TableConfig, TaskConfig
from tailrace.errors import QueueClosed, QueueError
from tailrace.transfer.queue.adapters.group import GroupLoader, broadcast_claim
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.base import Claim, NewRow, Row, RowId
from tailrace.transfer.queue.client.sync_queue import SyncQueue
from tailrace.types import Value
from tests.transfer.processes.served import LIMIT_S, serving
from tests.transfer.tables import tokens

TABLE = TableConfig(tasks=(TaskConfig(name="actor", reads=("prompt_ids",), policy=FirstInConfig(max_rows=3)),))
Work = Callable[[int], list[Any]]
"""The work of a rank, by its number. It returns a list that JSON can hold."""


def run(directory: Path, ranks: int, work: Work) -> list[list[Any]]:
    """Run `work` on each rank in a process, and return the results."""
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        fork.Process(target=_rank, args=(directory / "meeting", rank, ranks, work, theirs))
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    found = []
    for ours, _ in pipes:
        assert ours.poll(2 * LIMIT_S), "a rank says nothing"
        found.append(ours.recv())
    for process in processes:
        process.join(LIMIT_S)
        assert process.exitcode == 0
    return found


def _rank(meeting: Path, rank: int, ranks: int, work: Work, result: Connection) -> None:
    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks, timeout=limit)
    result.send(work(rank))
    dist.destroy_process_group()


def told(claim: Claim) -> list[Any]:
    """The claim as a list."""
    cells = [[(column, str(cell)) for column, cell in row.cells.items()] for row in claim.rows]
    kinds = [[type(cell).__name__ for cell in row.cells.values()] for row in claim.rows]
    ids = [(row.id, row.group_id, row.order, row.units) for row in claim.rows]
    return [claim.lease_id, claim.lease_s, claim.task, ids, cells, kinds]


CELLS: list[dict[str, Value]] = [
    {
        "prompt_ids": np.arange(length, dtype=np.int64),
        "response": f"{length} ü",
        "advantages": np.full(length, np.nan, np.float32),
        "metadata": {"parts": [length, None]} if length else None,
        "reward": length / 7,
    }
    for length in (3, 0, 70_000)
]
CLAIM = Claim(
    lease_id=2**40,
    lease_s=0.3,
    task="actor",
    rows=tuple(
        Row(id=RowId(place, 2**50), group_id=-place, order=place, cells=cells, units=(place, 5))
        for place, cells in enumerate(CELLS)
    ),
)


@pytest.mark.parametrize(("ranks", "src"), [(2, 0), (3, 2)])
def test_all_ranks_get_the_claim_of_one(tmp_path: Path, ranks: int, src: int) -> None:
    def work(rank: int) -> list[Any]:
        claim = broadcast_claim(CLAIM if rank == src else None, src=src)
        arrays = [cell for row in claim.rows for cell in row.cells.values() if isinstance(cell, np.ndarray)]
        assert rank == src or not any(array.flags.writeable for array in arrays)
        assert all(array.flags.aligned for array in arrays)
        return told(claim)

    assert run(tmp_path, ranks, work) == [told(CLAIM)] * ranks


def test_a_group_inside_the_world_has_its_own_claims(tmp_path: Path) -> None:
    def work(rank: int) -> list[Any]:
        groups = [dist.new_group([0]), dist.new_group([1, 2])]
        group = groups[min(rank, 1)]
        own = CLAIM if rank == 1 else None
        return [] if rank == 0 else told(broadcast_claim(own, src=1, group=group))

    assert run(tmp_path, 3, work) == [[], told(CLAIM), told(CLAIM)]


def test_what_one_rank_gets_instead_is_raised_on_all(tmp_path: Path) -> None:
    def work(rank: int) -> list[Any]:
        try:
            broadcast_claim(QueueClosed("closed for today") if rank == 0 else None, src=0)
        except QueueClosed as error:
            return [str(error)]
        return []

    assert run(tmp_path, 2, work) == [["closed for today"]] * 2


def test_a_group_trains_on_every_row_once(tmp_path: Path) -> None:
    with serving(tmp_path / "queue", TABLE) as served:
        rows = [NewRow(group_id=i, group_size=1, order=i, cells={"prompt_ids": tokens(i)}) for i in range(8)]
        served.queue.put(rows)
        found = run(tmp_path, 2, lambda rank: train(rank, served.address))
        assert found == [[[0, 1, 2], [3, 4, 5], [6], "closed"]] * 2
        stats = served.queue.stats().tasks["actor"]
        assert (stats.consumed, stats.ready, stats.leased) == (7, 1, 0)


def train(rank: int, address: QueueAddress) -> list[Any]:
    """The orders of each claim's rows. Rank 0 acks, and closes the queue at the end."""
    if rank:
        return claims(None)
    with SyncQueue(address, name="rank 0", timeout_s=LIMIT_S) as queue:
        return claims(queue)


def claims(queue: SyncQueue | None) -> list[Any]:
    found: list[Any] = []
    for claim in GroupLoader(queue, "actor", rows=7, src=0):
        assert all(len(row.cells["prompt_ids"]) == row.order for row in claim.rows)  # type: ignore[arg-type]
        found.append([row.order for row in claim.rows])
        if queue is not None:
            queue.ack(claim, {row.id: {} for row in claim.rows})
    if queue is not None:
        queue.close()
    try:
        next(GroupLoader(queue, "actor", rows=1, src=0))
    except QueueClosed:
        found.append("closed")
    return found


def test_only_the_rank_that_asks_has_a_queue(tmp_path: Path) -> None:
    def work(rank: int) -> list[Any]:
        with pytest.raises(QueueError, match="was given none; pass it on rank 0 alone"):
            GroupLoader(None, "actor", rows=1, src=0)
        return []

    run(tmp_path, 1, work)


def test_ranks_train_on_the_same_claims_as_the_page_shows(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "transfer_queue.md").read_text()
    [example] = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "GroupLoader" in code]
    with serving(tmp_path / "queue", TABLE) as served:
        served.queue.put([NewRow(group_id=i, group_size=1, order=i, cells={"prompt_ids": tokens(1)}) for i in range(4)])

        def work(rank: int) -> list[Any]:
            orders: list[int] = []
            known = {
                "path": tmp_path / "queue" / "connection.json",
                "train": lambda rows: orders.extend(row.order for row in rows),
            }
            exec(example.replace("rows=512", "rows=4"), known)
            return orders

        assert run(tmp_path, 2, work) == [[0, 1, 2, 3]] * 2
        assert served.queue.stats().rows == 0
