"""Very many small rows pass from many processes through a queue to many others, and each comes out once."""

import subprocess
import sys
from pathlib import Path

from tailrace.config.transfer import ServiceQueueConfig
from tailrace.transfer.queue.client.sync_queue import SyncQueue
from tailrace.transfer.queue.processes.supervisor import QueueProcesses
from tests.helpers.effort import effort
from tests.helpers.waiting import until
from tests.transfer.faults.counting import TABLE, TIMEOUT_S

ROWS, PRODUCERS, CONSUMERS = effort(1_000_000, 100_000), 4, 4


def start(connection: Path, *words: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.transfer.faults.counting", str(connection), *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_very_many_rows_go_through_four_producers_and_four_consumers_once_each(tmp_path: Path) -> None:
    with QueueProcesses(ServiceQueueConfig(), TABLE, tmp_path) as processes:
        consumers = [start(processes.connection, "sum") for _ in range(CONSUMERS)]
        share = ROWS // PRODUCERS
        producers = [start(processes.connection, "put", n * share, (n + 1) * share) for n in range(PRODUCERS)]
        assert [producer.communicate(timeout=TIMEOUT_S)[0] for producer in producers] == [""] * PRODUCERS
        assert [producer.returncode for producer in producers] == [0] * PRODUCERS
        with SyncQueue(processes.address, name="test") as queue:
            until(lambda: queue.stats().rows == 0)
            queue.close()
        said = [consumer.communicate(timeout=TIMEOUT_S)[0] for consumer in consumers]
    sums = zip(*(map(int, words.split()) for words in said), strict=True)
    squares = (ROWS - 1) * ROWS * (2 * ROWS - 1) // 6
    assert [sum(column) % 2**64 for column in sums] == [ROWS, ROWS * (ROWS - 1) // 2, squares % 2**64]
