"""A queue in processes of its own, and a client of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tailrace.config.queue_table import TableConfig
from tailrace.config.transfer import ServiceQueueConfig
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.client.sync_queue import SyncQueue
from tailrace.transfer.queue.processes.supervisor import QueueProcesses

LIMIT_S = 20.0


class Served(NamedTuple):
    address: QueueAddress
    queue: SyncQueue


@contextmanager
def serving(directory: Path, table: TableConfig, **config: Any) -> Iterator[Served]:
    """Serve a queue of one unit. Its calls wait at most `LIMIT_S`."""
    values = {"units": 1, "timeout_s": LIMIT_S, **config}
    with (
        QueueProcesses(ServiceQueueConfig.model_validate(values), table, directory) as processes,
        SyncQueue(processes.address, name="test", timeout_s=LIMIT_S) as queue,
    ):
        yield Served(processes.address, queue)
