"""A controller that only records what a unit tells it, and a client that asks a unit one thing at a time."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tailrace.config.columns import ColumnKind
from tailrace.errors import TailraceError
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.cells import PartCodec, write_rows
from tailrace.transfer.queue.messages import (
    QUEUE,
    Cells,
    Join,
    Joined,
    Read,
    Run,
    Write,
    Written,
    pack,
    row_ids,
    unpack,
)
from tailrace.transfer.wire.calls import Call, Operation, Step
from tailrace.transfer.wire.connection import Patience
from tailrace.transfer.wire.frames import Buffer, Reply
from tailrace.transfer.wire.messages import Accepted, Message
from tailrace.transfer.wire.server import Handler, Incoming, Service
from tailrace.transfer.wire.sync import SyncClient
from tailrace.types import Value
from tests.transfer.wire.desk import LIMIT_S, TOKEN
from tests.transfer.wire.rows import ints, packed

COLUMNS = {
    "ids": ColumnKind.INTS,
    "probs": ColumnKind.FLOATS,
    "number": ColumnKind.INT,
    "text": ColumnKind.TEXT,
}
CODEC = PartCodec(COLUMNS)
UNIT = 3

Rows = Mapping[RowId, Mapping[str, Value]]


class Recorder(Service):
    """A controller that records what a unit tells it."""

    def __init__(self, unit: int = UNIT, refusal: TailraceError | None = None) -> None:
        self.unit = unit
        self.refusal = refusal
        """The error that Join raises."""
        self.failures: list[TailraceError] = []
        """The errors that the next calls of Written raise, one each."""
        self.leaving = self.left = False
        """What the answer to Join says of the unit."""
        self.joins: list[Join] = []
        self.written: list[tuple[int, list[RowId]]] = []
        self._changed = threading.Condition()

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        return {Join: self._join, Written: self._written}

    @property
    def next_deadline(self) -> float | None:
        return None

    def tick(self, now: float) -> None:
        raise AssertionError("there is no deadline")

    def gone(self, client: str) -> None:
        pass

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, LIMIT_S), (self.joins, self.written)

    def _join(self, incoming: Incoming) -> Reply:
        if self.refusal is not None:
            raise self.refusal
        with self._changed:
            self.joins.append(incoming.message)
            self._changed.notify_all()
        return Reply(Joined(self.unit, COLUMNS, leaving=self.leaving, left=self.left))

    def _written(self, incoming: Incoming) -> Reply:
        if self.failures:
            raise self.failures.pop()
        with self._changed:
            self.written.append((incoming.message.unit, row_ids(incoming.message.rows)))
            self._changed.notify_all()
        return Reply(Accepted())


class Client:
    """A client of one unit. Each instance is a new client to the unit."""

    def __init__(self, endpoint: str) -> None:
        self._client = SyncClient("client", TOKEN, QUEUE, patience=Patience(limit_s=LIMIT_S))
        self._endpoint = endpoint

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def call(self, message: Message, frames: Sequence[Buffer] = ()) -> Reply:
        def operation() -> Operation[Reply]:
            [outcome] = yield Step([Call(self._endpoint, message, frames)])
            if isinstance(outcome, TailraceError):
                raise outcome
            return outcome

        return self._client.run(operation())

    def ask(self, message: Message, frames: Sequence[Buffer] = ()) -> Any:
        return self.call(message, frames).answer

    def write(self, rows: Rows, tag: int = 0) -> None:
        """Write in frames, one run for consecutive rows with the same columns."""
        runs, memory = described(rows)
        frames, start = [], 0
        for run in runs:
            size = sum(CODEC.sizes(run.columns, run.table()))
            frames.append(bytes(memory[start : start + size]))
            start += size
        assert self.ask(Write(tag, pack(rows), runs, None), frames) == Accepted()

    def read(self, rows: Sequence[RowId], columns: Sequence[str], tags: Any = 0) -> list[dict[str, Value]]:
        """Read through frames. `tags`: anything that broadcasts to [n, columns]."""
        reply = self.call(read(rows, columns, tags))
        assert isinstance(reply.answer, Cells)
        assert reply.answer.pin is None
        return cells_in(reply.answer, columns, reply.frames)


def read(rows: Sequence[RowId], columns: Sequence[str], tags: Any = 0, *, shared: bool = False) -> Read:
    filled = np.broadcast_to(ints(tags), (len(rows), len(columns)))
    return Read(pack(rows), list(columns), packed(filled), shared)


def described(rows: Rows) -> tuple[list[Run], bytearray]:
    """The runs of `rows`, and the bytes of their parts one after the other."""
    parts = CODEC.measure_rows(rows.values())
    memory = bytearray(sum(alike.nbytes for alike in parts))
    write_rows(parts, memoryview(memory))
    return [Run(len(alike), list(alike.columns), pack(alike.lengths)) for alike in parts], memory


def cells_in(cells: Cells, columns: Sequence[str], memories: Sequence[Buffer]) -> list[dict[str, Value]]:
    """The cells of a reply, read from these frames or segments."""
    lengths = unpack(cells.lengths, len(columns)).tolist()
    places = unpack(cells.places, 2).reshape(-1, len(columns), 2).tolist()
    rows = []
    for of_row, where in zip(lengths, places, strict=True):
        row: dict[str, Value] = {}
        for column, length, (number, start) in zip(columns, of_row, where, strict=True):
            size = CODEC.layout({column: length}).nbytes
            assert start % 8 == 0
            row |= CODEC.read(memoryview(memories[number])[start : start + size], {column: length}, [column])
        rows.append(row)
    return rows
