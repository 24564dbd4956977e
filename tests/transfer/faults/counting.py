"""Producers and consumers of very many small rows: `python -m tests.transfer.faults.counting CONNECTION ROLE ...`."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from tailrace.config.columns import ColumnKind
from tailrace.config.queue_policies import FirstInConfig
from tailrace.config.queue_table import TableConfig, TaskConfig
from tailrace.errors import QueueClosed
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.base import NewRow
from tailrace.transfer.queue.client.sync_queue import SyncQueue

BATCH = 2048
TABLE = TableConfig(
    tasks=(TaskConfig(name="sum", reads=("number",), policy=FirstInConfig(max_rows=BATCH)),),
    columns={"number": ColumnKind.INT},
)
TIMEOUT_S = 300.0


def put_numbers(queue: SyncQueue, numbers: range) -> None:
    """Put a row for each number."""
    for start in range(numbers.start, numbers.stop, BATCH):
        batch = numbers[start - numbers.start :][:BATCH]
        queue.put([NewRow(group_id=n, group_size=1, order=n, cells={"number": n}) for n in batch])


def sum_numbers(queue: SyncQueue) -> Sequence[int]:
    """Until the queue is closed, sum up the rows: their count, their numbers and the squares of these, modulo 2^64."""
    sums = np.zeros(3, np.uint64)
    with suppress(QueueClosed):
        while True:
            claim = queue.claim("sum")
            numbers = np.array([row.cells["number"] for row in claim.rows], np.uint64)
            queue.ack(claim, {row.id: {} for row in claim.rows})
            sums += np.array([numbers.size, numbers.sum(), (numbers * numbers).sum()], np.uint64)
    return list(map(int, sums))


def main() -> None:
    """Run the role `put START STOP`, or the role `sum`, which prints the sums."""
    connection, role, *bounds = sys.argv[1:]
    with SyncQueue(QueueAddress.read(Path(connection)), name=role, timeout_s=TIMEOUT_S) as queue:
        if role == "put":
            put_numbers(queue, range(*map(int, bounds)))
        else:
            print(*sum_numbers(queue))


if __name__ == "__main__":
    main()
