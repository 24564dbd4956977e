"""The turns of both sides of `make bench-queue`, and their rows. It imports nothing of either side.

    begin ──▶ put ──▶ claim ──▶ fetch ──▶ release ──▶ end
                      └────── get ─────┘

A side defines how its queue does each of these. How they are timed is defined here, once for both. `prepare` turns
arrays into the input of `put`, so that this is made before the clock starts.
"""

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gate
import numpy as np

Array = np.ndarray[Any, Any]
Rows = dict[str, list[Array]]
"""The cell of each row, by column."""
Figures = dict[str, Any]

BATCH_ROWS = 256
CHUNK_ROWS = 4096
"""Rows of a put that fills the queue."""
CLAIM_ROWS = 16
"""Rows of a claim beside many stored rows."""
WORKERS = 4
"""Number of producers, and of consumers, that work at once."""
WORKER_ROWS = 32
"""Rows that each of them puts or claims at a time."""


def varlen_rows(rows: int = BATCH_ROWS) -> Rows:
    """Return a batch of samples: prompts of 512 to 1,536 tokens, responses of 2,048 to 6,144."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(512, 1537, rows)
    responses = rng.integers(2048, 6145, rows)
    return {
        "input_ids": [rng.integers(0, 150_000, length) for length in prompts],
        "responses": [rng.integers(0, 150_000, length) for length in responses],
        "old_log_probs": [rng.random(length, np.float32) for length in responses],
    }


def dense_rows() -> Rows:
    """Return a batch of samples of equal lengths."""
    rng = np.random.default_rng(0)
    return {
        "input_ids": list(rng.integers(0, 150_000, (BATCH_ROWS, 1024))),
        "responses": list(rng.integers(0, 150_000, (BATCH_ROWS, 4096))),
        "old_log_probs": list(rng.random((BATCH_ROWS, 4096), np.float32)),
    }


def small_rows(rows: int) -> Rows:
    """Return rows of 64 bytes."""
    return {"x": list(np.arange(rows * 8, dtype=np.int64).reshape(rows, 8))}


BATCHES: dict[str, Callable[[], Rows]] = {"varlen": varlen_rows, "dense": dense_rows}


class Side(ABC):
    """The queue of one side. As long as it is new, it hands rows out in the order in which they were put."""

    @abstractmethod
    def begin(self, name: str) -> None:
        """Begin a new set of rows, which other processes know by this name."""

    @abstractmethod
    def prepare(self, rows: Rows) -> Any:
        """Return the input of `put` for these rows, for one call."""

    @abstractmethod
    def put(self, prepared: Any) -> None:
        """Store the prepared rows."""

    @abstractmethod
    def claim(self, columns: Sequence[str], rows: int) -> Any:
        """Claim up to `rows` rows for this consumer alone; wait until there are some."""

    @abstractmethod
    def fetch(self, claimed: Any) -> Any:
        """Return the cells of claimed rows; there is nothing to do where a claim brings them along."""

    @abstractmethod
    def arrays(self, fetched: Any) -> dict[str, list[Array]]:
        """Return arrays that hold the cells of all rows, one after the other, by column."""

    @abstractmethod
    def release(self, claimed: Any) -> None:
        """Release rows: the consumer is done with them."""

    @abstractmethod
    def rows(self, claimed: Any) -> int:
        """Return the number of claimed rows."""

    @abstractmethod
    def end(self) -> None:
        """Remove the set from the queue, including rows that were not claimed."""


def take_turns(side: Side, worker_command: Sequence[str], logs: Path) -> None:
    """Do the tasks of the benchmark. `worker_command` starts a program that joins the queue and calls `work`."""
    with ExitStack() as stack:
        workers: list[gate.Contestant] = []
        for task in gate.turns():
            match task.pop("do"):
                case "batch":
                    figures = batch_turn(side, **task)
                case "calls":
                    figures = calls_turn(side, **task)
                case "fill":
                    figures = fill(side, **task)
                case "claims":
                    figures = claims_turn(side, **task)
                case "crowd":
                    workers = workers or start_workers(stack, worker_command, logs)
                    figures = crowd_turn(side, workers, **task)
                case unknown:
                    raise ValueError(f"the benchmark asked for {unknown!r}, which is nothing that a side does")
            gate.done(**figures)


def batch_turn(side: Side, workload: str, passes: int, compare: bool) -> Figures:
    """Put and get a batch, `passes` times after one of warm-up; `compare`: whether the warm-up also compares all cells.

    Raises:
        RuntimeError: the cells did not come back as they were put.
    """
    rows = BATCHES[workload]()
    copy = PlainCopy(rows)
    one_pass(side, rows, copy, compare=compare)
    timed = [one_pass(side, rows, copy, compare=False) for _ in range(passes)]
    figures: Figures = {name: [times[name] for times in timed] for name in timed[0]}
    return figures | {"bytes": total_bytes(rows)}


def one_pass(side: Side, rows: Rows, copy: "PlainCopy", *, compare: bool) -> dict[str, float]:
    """Return the seconds of each part of a batch's way through the queue, and of a plain copy at the same time of
    day."""
    side.begin("batch")
    prepared = side.prepare(rows)
    copied = copy.seconds()
    start = time.perf_counter()
    side.put(prepared)
    put = time.perf_counter()
    claimed = side.claim(list(rows), BATCH_ROWS)
    fetched = side.fetch(claimed)
    got = time.perf_counter()
    arrays = side.arrays(fetched)
    if compare:
        check_cells(rows, arrays)
    reading = time.perf_counter()
    total = checksum(arrays)
    read = time.perf_counter()
    if total != checksum(rows):
        raise RuntimeError("the cells that came back have another checksum than those put: nothing to compare")
    del arrays, fetched
    releasing = time.perf_counter()
    side.release(claimed)
    side.end()
    released = time.perf_counter()
    return {
        "copy_s": copied,
        "put_s": put - start,
        "get_s": got - put,
        "get_and_read_s": got - put + read - reading,
        "get_and_release_s": got - put + released - releasing,
    }


def calls_turn(side: Side, calls: int) -> Figures:
    """Put one row of 64 bytes a call, then get one row a call."""
    side.begin("calls")
    rows = [side.prepare(small_rows(1)) for _ in range(calls)]
    start = time.perf_counter()
    for row in rows:
        side.put(row)
    put = time.perf_counter()
    claimed = []
    for _ in range(calls):
        claimed.append(side.claim(["x"], 1))
        side.fetch(claimed[-1])
    got = time.perf_counter()
    for claim in claimed:
        side.release(claim)
    side.end()
    return {"put_s": (put - start) / calls, "get_s": (got - put) / calls}


def fill(side: Side, rows: int) -> Figures:
    """Store so many rows of 64 bytes, and no others."""
    side.end()
    side.begin(f"fill {rows}")
    for start in range(0, rows, CHUNK_ROWS):
        side.put(side.prepare(small_rows(min(CHUNK_ROWS, rows - start))))
    return {}


def claims_turn(side: Side, claims: int) -> Figures:
    """Claim CLAIM_ROWS rows at a time, beside all that are stored."""
    times: Figures = {"claim_s": [], "get_s": []}
    done = []
    for _ in range(claims):
        start = time.perf_counter()
        claimed = side.claim(["x"], CLAIM_ROWS)
        claim = time.perf_counter()
        side.fetch(claimed)
        times["get_s"].append(time.perf_counter() - start)
        times["claim_s"].append(claim - start)
        done.append(claimed)
    for claimed in done:
        side.release(claimed)
    return times


def start_workers(stack: ExitStack, command: Sequence[str], logs: Path) -> list[gate.Contestant]:
    """Start producers, then consumers: processes of their own, which `stack` ends."""
    workers = []
    for number in range(2 * WORKERS):
        worker = gate.Contestant([sys.executable, *command], logs.with_suffix(f".{number}.log"), {})
        stack.callback(worker.stop)
        workers.append(worker)
    return workers


def crowd_turn(side: Side, workers: Sequence[gate.Contestant], puts: int) -> Figures:
    """Let all workers work at once: each producer puts WORKER_ROWS rows `puts` times, each consumer takes as many.

    Raises:
        RuntimeError: the rows that came out are not those that were put in.
    """
    side.begin("crowd")
    share = puts * WORKER_ROWS

    def prepare(number: int) -> Figures:
        return workers[number].step(prepare=puts)

    def step(number: int) -> Figures:
        return workers[number].step(rows=share, produce=number < WORKERS)

    with ThreadPoolExecutor(len(workers)) as threads:
        list(threads.map(prepare, range(WORKERS)))
        figures = list(threads.map(step, range(len(workers))))
    put, got = (sum(int(f["checksum"]) for f in those) for those in (figures[:WORKERS], figures[WORKERS:]))
    if put != got:
        raise RuntimeError(f"the consumers have cells of checksum {got}, the producers put {put}: nothing to compare")
    side.end()
    seconds = max(f["end"] for f in figures) - min(f["start"] for f in figures)
    nbytes = sum(f["bytes"] for f in figures[:WORKERS])
    return {"seconds": seconds, "rows": WORKERS * share, "bytes": nbytes}


def work(side: Side) -> None:
    """Do a producer's or consumer's part of `crowd_turn`. Its clock is that of the machine, the same in all
    processes."""
    rows = varlen_rows(WORKER_ROWS)
    side.begin("crowd")
    batches: list[Any] = []
    for task in gate.turns():
        if "prepare" in task:
            batches = [side.prepare(rows) for _ in range(task["prepare"])]
            gate.done()
        elif task["produce"]:
            gate.done(**produce(side, rows, batches))
        else:
            gate.done(**consume(side, list(rows), int(task["rows"])))


def produce(side: Side, rows: Rows, batches: Sequence[Any]) -> Figures:
    """Put batches of `rows`, one after the other."""
    start = time.monotonic()
    for batch in batches:
        side.put(batch)
    end = time.monotonic()
    total, nbytes = checksum(rows), total_bytes(rows)
    return {"start": start, "end": end, "checksum": len(batches) * total, "bytes": len(batches) * nbytes}


def consume(side: Side, columns: Sequence[str], share: int) -> Figures:
    """Take `share` rows, read every byte of them, and release them."""
    start = time.monotonic()
    left, total = share, 0
    while left:
        claimed = side.claim(columns, min(WORKER_ROWS, left))
        total += checksum(side.arrays(side.fetch(claimed)))
        left -= side.rows(claimed)
        side.release(claimed)
    return {"start": start, "end": time.monotonic(), "checksum": total}


def check_cells(rows: Rows, arrays: dict[str, list[Array]]) -> None:
    """Compare all cells, in the order of the rows.

    Raises:
        RuntimeError: some cells did not come back as they were put.
    """
    for column, cells in rows.items():
        if not np.array_equal(np.concatenate(cells), np.concatenate([array.ravel() for array in arrays[column]])):
            raise RuntimeError(f"column {column!r} came back other than it was put: nothing to compare")


def checksum(arrays: dict[str, list[Array]]) -> int:
    """Return a checksum for which every byte is read once; it is the same however rows are spread over arrays."""
    return sum(
        int(array.view(np.int64 if array.itemsize == 8 else np.int32).sum(dtype=np.int64))
        for column in arrays.values()
        for array in column
    )


class PlainCopy:
    """A copy of the same bytes in one go, into memory that was written before: once in a pass, as a put comes once.

    A copy that is repeated at once would stay inside the caches.
    """

    def __init__(self, rows: Rows) -> None:
        self._source = np.concatenate([cell.view(np.uint8) for column in rows.values() for cell in column])
        self._target = self._source.copy()

    def seconds(self) -> float:
        """Return the seconds that the copy takes now."""
        start = time.perf_counter()
        np.copyto(self._target, self._source)
        return time.perf_counter() - start


def total_bytes(rows: Rows) -> int:
    """Return the bytes of all cells."""
    return sum(cell.nbytes for column in rows.values() for cell in column)
