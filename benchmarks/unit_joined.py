"""The rate of puts before and after another storage unit has joined the queue.

    python benchmarks/unit_joined.py [--rounds 5] [--puts 9]

A queue of one unit takes batches of 256 rows of about 58 KB, and keeps them. Then a second unit joins, takes its part
of further batches, and leaves: its rows go to the first one. All rows are claimed in the end, and each has to come
once. The last line is JSON: `unit_joined`, the median over rounds of MB/s after over before.
"""

import json
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path

import typer
from queue_ours import COLUMNS, OurSide, connect, table_of
from queue_turns import BATCH_ROWS, CHUNK_ROWS, varlen_rows

from tailrace.config.transfer import ServiceQueueConfig
from tailrace.transfer.queue.processes.added import add_unit
from tailrace.transfer.queue.processes.supervisor import QueueProcesses


def unit_joined(rounds: int = 5, puts: int = 9) -> dict[str, float]:
    """The figures. Rounds after the first, which is warm-up, count.

    Raises:
        RuntimeError: a row was lost, or came twice.
    """
    rows = varlen_rows()
    megabytes = sum(cell.nbytes for column in rows.values() for cell in column) / 1e6
    before, after = [], []
    config = ServiceQueueConfig(units=1, max_rows=2**21, max_bytes=16 * 2**30)
    with (
        tempfile.TemporaryDirectory() as directory,
        QueueProcesses(config, table_of(COLUMNS["batch"]), Path(directory)) as processes,
        connect(processes.address, "shared") as queue,
    ):
        side = OurSide(queue)

        def rate() -> float:
            seconds = []
            for _ in range(puts):
                prepared = side.prepare(rows)
                start = time.perf_counter()
                side.put(prepared)
                seconds.append(time.perf_counter() - start)
            return megabytes / statistics.median(seconds)

        for _ in range(rounds + 1):
            before.append(rate())
            with add_unit(processes.address, log=Path(directory) / "added.log"):
                after.append(rate())
            seen: Counter[int] = Counter()
            while queue.stats().rows:
                claim = side.claim([], CHUNK_ROWS)
                seen.update(row.order for row in claim.rows)
                side.release(claim)
            if len(seen) != 2 * puts * BATCH_ROWS or set(seen.values()) != {1}:
                raise RuntimeError(f"of {2 * puts * BATCH_ROWS} rows {len(seen)} came, {seen.total()} times")
    ratio = statistics.median(new / old for new, old in zip(after[1:], before[1:], strict=True))
    return {"unit_joined": round(ratio, 2), "unit_joined_mb_per_s": round(statistics.median(after[1:]))}


def main(rounds: int = 5, puts: int = 9) -> None:
    """Print the figures."""
    print(json.dumps(unit_joined(rounds, puts)))


if __name__ == "__main__":
    typer.run(main)
