"""Reads the rows and cell facts of requests, in the types of the control plane."""

from collections.abc import Sequence

from tailrace.errors import WireError
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.cells import PartCodec
from tailrace.transfer.queue.messages import NO_VERSION, Ack, Admit, Run, row_ids, unpack
from tailrace.transfer.queue.policies.base import CellFacts
from tailrace.transfer.queue.rows.state import RowHeader


def new_rows(message: Admit) -> list[RowHeader]:
    """The rows that a producer announces.

    Raises:
        WireError: they are not packed as such.
    """
    return [RowHeader(*row) for row in unpack(message.rows, 3).tolist()]


def new_facts(message: Admit, count: int) -> list[CellFacts]:
    """The cell facts of the `count` new rows of an Admit.

    Raises:
        WireError: its versions or runs are of another number of rows.
    """
    return _cell_facts(message.runs, message.versions, count)


def acked_facts(message: Ack) -> dict[RowId, CellFacts]:
    """The facts about the outputs of an Ack, by row.

    Raises:
        WireError: the ack contradicts itself.
    """
    ids = row_ids(message.rows)
    facts = dict(zip(ids, _cell_facts(message.runs, message.versions, len(ids)), strict=True))
    if len(facts) < len(ids):
        raise WireError(f"an ack of {len(ids)} rows names one of them twice")
    return facts


def part_bytes(codec: PartCodec, runs: Sequence[Run]) -> list[int]:
    """The bytes that the part of each row takes, in the order of the runs.

    Raises:
        ColumnError: an unknown column, or a length that no cell of it has.
    """
    return [nbytes for run in runs for nbytes in codec.sizes(run.columns, run.table())]


def _cell_facts(runs: Sequence[Run], versions: bytes, count: int) -> list[CellFacts]:
    """The facts of each of `count` rows; without runs, no row has cells."""
    known = unpack(versions, 1)[:, 0].tolist()
    rows = sum([run.rows for run in runs]) if runs else count
    if not len(known) == count == rows:
        raise WireError(f"{count} rows come with {len(known)} versions and the lengths of {rows}")
    lengths = [dict(zip(run.columns, row, strict=True)) for run in runs for row in run.table().tolist()]
    return [
        CellFacts(lengths=row, version=None if version == NO_VERSION else version)
        for row, version in zip(lengths or [{}] * count, known, strict=True)
    ]
