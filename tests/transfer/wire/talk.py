"""Short operations on a desk, whose rows have one cell, `prompt_ids`."""

import numpy as np

from tailrace.transfer.queue.base import QueueStats, RowId
from tailrace.transfer.queue.messages import (
    NO_VERSION,
    Ack,
    Admit,
    Admitted,
    Cells,
    Claim,
    Claimed,
    Counted,
    Nack,
    Read,
    Renew,
    Run,
    Stats,
    Write,
    pack,
    row_ids,
    unpack,
)
from tailrace.transfer.wire.calls import Call, Operation, Step, ask, expect
from tailrace.transfer.wire.messages import Accepted
from tailrace.types import IntArray
from tests.transfer.wire.desk import LIMIT_S
from tests.transfer.wire.rows import packed


def put(to: str, *cells: IntArray) -> Operation[list[RowId]]:
    """Put a row for each cell."""
    run = Run(len(cells), ["prompt_ids"], packed([[len(cell)] for cell in cells]))
    rows = packed([[index, 1, 100 * index] for index in range(len(cells))])
    versions = packed([NO_VERSION] * len(cells))
    admitted = yield from ask(Call(to, Admit(rows, versions, [run], 0, 0.0)), Admitted)
    yield from ask(Call(to, Write(0, admitted.rows, [run], None), [np.concatenate(cells).data]), Accepted)
    return row_ids(admitted.rows)


def claim(to: str, wait_s: float = LIMIT_S) -> Operation[tuple[int, IntArray]]:
    """Claim, and return the lease and the cell of its row."""
    claimed = yield from ask(Call(to, Claim("actor", 1, None, wait_s), wait_s=wait_s), Claimed)
    nack = Call(to, Nack(claimed.lease_id, None))
    rows = pack(unpack(claimed.rows, 4)[:, :2])
    [outcome] = yield Step([Call(to, Read(rows, claimed.columns, claimed.tags, False))], otherwise=[nack])
    expect(outcome, Cells)
    assert not isinstance(outcome, Exception)
    return claimed.lease_id, np.frombuffer(outcome.frames[0], np.int64)


def ack(to: str, lease: int) -> Operation[None]:
    """Ack the whole lease, without outputs."""
    yield from ask(Call(to, Ack(lease, b"", b"", [], [])), Accepted)


def nack(to: str, lease: int) -> Operation[None]:
    """Give the lease back."""
    yield from ask(Call(to, Nack(lease, None)), Accepted)


def renew(to: str, lease: int) -> Operation[None]:
    """Renew the lease."""
    yield from ask(Call(to, Renew(lease)), Accepted)


def stats(to: str) -> Operation[QueueStats]:
    """The counts of the desk; see `Desk`."""
    return (yield from ask(Call(to, Stats()), Counted)).stats
