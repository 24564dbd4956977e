"""Tailrace's side of `make bench-queue`: LOGS TABLE TRANSPORT CONTROLLERS, or --join CONNECTION TRANSPORT for a worker.

It has one controller or two, and two units, in processes of their own, as `queue.type=service` starts them. The calls
are those of the blocking client:

    put       put                              claim     claim, which brings the cells along: there is nothing to fetch
    release   ack, after which rows leave      end       stats, and claim and ack where rows are left

TABLE is `batch` or `small`: the columns that the task reads. TRANSPORT is `shared`, for cells in memory that the
processes share, or `tcp`, for a client with TCP connections alone, as one on another host has.
"""

import itertools
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
from queue_turns import CHUNK_ROWS, Array, PlainCopy, Rows, Side, one_pass, take_turns, varlen_rows, work

from tailrace.config.columns import ColumnKind
from tailrace.config.queue_policies import FirstInConfig
from tailrace.config.queue_table import TableConfig, TaskConfig
from tailrace.config.transfer import ArenaStorageConfig, MemoryStorageConfig, ServiceQueueConfig, StorageConfig
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.base import Claim, NewRow
from tailrace.transfer.queue.client.sync_queue import SyncQueue
from tailrace.transfer.queue.processes.several import queue_processes
from tailrace.transfer.wire import sockets

TASK = "task"
COLUMNS = {
    "batch": {
        "input_ids": ColumnKind.INTS,
        "responses": ColumnKind.INTS,
        "old_log_probs": ColumnKind.FLOATS,
    },
    "small": {"x": ColumnKind.INTS},
}
STORAGE: dict[str, StorageConfig] = {"shared": ArenaStorageConfig(), "tcp": MemoryStorageConfig()}
GROUP_ROWS = 16
LIMIT_S = 120.0
"""Limit of every call in seconds; a call that takes longer has failed."""


class OurSide(Side):
    """Rows come in groups of 16, as the samples of a prompt do; fewer are one group."""

    def __init__(self, queue: SyncQueue) -> None:
        self._queue = queue
        self._orders = itertools.count(os.getpid() << 32)  # other processes use other numbers
        self._groups = itertools.count(os.getpid() << 32)

    def begin(self, name: str) -> None:
        """See `Side.begin`: all rows in the queue are one set."""

    def prepare(self, rows: Rows) -> list[NewRow]:
        """See `Side.prepare`."""
        cells = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
        prepared = []
        for start in range(0, len(cells), GROUP_ROWS):
            group, group_id = cells[start : start + GROUP_ROWS], next(self._groups)
            prepared += [
                NewRow(group_id=group_id, group_size=len(group), order=next(self._orders), cells=row) for row in group
            ]
        return prepared

    def put(self, prepared: list[NewRow]) -> None:
        """See `Side.put`."""
        self._queue.put(prepared, timeout=LIMIT_S)

    def claim(self, columns: Sequence[str], rows: int) -> Claim:
        """See `Side.claim`."""
        return self._queue.claim(TASK, limit=rows, timeout=LIMIT_S)

    def fetch(self, claimed: Claim) -> Claim:
        """See `Side.fetch`."""
        return claimed

    def arrays(self, fetched: Claim) -> dict[str, list[Array]]:
        """See `Side.arrays`."""
        arrays: dict[str, list[Array]] = {column: [] for column in fetched.rows[0].cells}
        for row in fetched.rows:
            for column, cell in row.cells.items():
                assert isinstance(cell, np.ndarray)
                arrays[column].append(cell)
        return arrays

    def release(self, claimed: Claim) -> None:
        """See `Side.release`."""
        self._queue.ack(claimed, {row.id: {} for row in claimed.rows})

    def rows(self, claimed: Claim) -> int:
        """See `Side.rows`."""
        return len(claimed.rows)

    def end(self) -> None:
        """See `Side.end`."""
        while self._queue.stats().rows:
            self.release(self.claim([], CHUNK_ROWS))


def table_of(columns: dict[str, ColumnKind]) -> TableConfig:
    """Return a table of one task, which reads all columns and takes rows in their order."""
    task = TaskConfig(name=TASK, reads=tuple(columns), policy=FirstInConfig(max_rows=CHUNK_ROWS))
    return TableConfig(tasks=(task,), columns=columns)


def connect(address: QueueAddress, transport: str) -> SyncQueue:
    """Return a client of the queue at `address`."""
    if transport == "tcp":
        pretend_to_be_elsewhere()
    return SyncQueue(address, name=f"bench-{os.getpid()}", shared_memory=transport == "shared")


def pretend_to_be_elsewhere() -> None:
    """Make this process take every server for one on another host, so that it does not use their local sockets."""
    here = sockets.host_id
    for module in list(sys.modules.values()):
        if getattr(module, "host_id", None) is here:
            module.host_id = lambda: "elsewhere"  # type: ignore[attr-defined]


def rehearse(side: OurSide, transport: str) -> None:
    """Send a batch through the queue, and check by which way it went.

    Raises:
        RuntimeError: a client that was to use TCP alone has no such connections to the controller and a unit.
    """
    rows = varlen_rows()
    one_pass(side, rows, PlainCopy(rows), compare=True)
    connections = [c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_ESTABLISHED]
    if transport == "tcp" and len(connections) < 2:
        raise RuntimeError(f"the client has {len(connections)} TCP connections and must have 2: nothing to compare")


def main(logs: Path, table: str, transport: str, controllers: int) -> None:
    """Serve a queue and take turns with it."""
    config = ServiceQueueConfig(
        controllers=controllers, max_rows=2**21, max_bytes=8 * 2**30, storage=STORAGE[transport]
    )
    with (
        tempfile.TemporaryDirectory() as directory,
        queue_processes(config, table_of(COLUMNS[table]), Path(directory)) as processes,
        connect(processes.address, transport) as queue,
    ):
        side = OurSide(queue)
        if table == "batch" and controllers == 1:  # else a claim has the rows of one controller alone
            rehearse(side, transport)
        take_turns(side, [__file__, "--join", str(Path(directory) / "connection.json"), transport], logs)


def join(connection: Path, transport: str) -> None:
    """Be a worker: a client of the queue whose address is in `connection`."""
    with connect(QueueAddress.read(connection), transport) as queue:
        work(OurSide(queue))


if __name__ == "__main__":
    if sys.argv[1] == "--join":
        join(Path(sys.argv[2]), sys.argv[3])
    else:
        main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
