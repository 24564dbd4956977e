"""Cells from units: each row from the first of its units that has it.

[Read to every unit that is the first of some rows] ─▶ [Read to the second unit of the rows that did not come] ─▶ …
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tailrace.errors import PeerLost, StaleRowError, TailraceError, WireError
from tailrace.transfer.queue.client.directory import endpoint
from tailrace.transfer.queue.client.memory import frame_memory
from tailrace.transfer.queue.client.session import Session
from tailrace.transfer.queue.messages import NO_UNIT, Cells, Inline, Read, Unit, pack, unpack
from tailrace.transfer.wire.calls import Call, Operation, Step, expect
from tailrace.transfer.wire.frames import Reply
from tailrace.types import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """Cells of n rows in c columns."""

    rows: IntArray
    """[n, 2]: slot, generation."""
    units: IntArray
    """[n, width], see `Claimed.units`."""
    columns: list[str]
    tags: IntArray
    """[n, c], see `Claimed.tags`."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """Cells of k of the rows, from one unit."""

    index: IntArray
    """[k], of these rows among those that were wanted."""
    lengths: IntArray
    """[k, c], see `Run.lengths`."""
    places: IntArray
    """[k, c, 2]: the number of the memory, and bytes from its beginning."""
    memories: list[memoryview]


def read(session: Session, wanted: Wanted, *, otherwise: Sequence[Call] = ()) -> Operation[list[Found]]:
    """Every wanted cell.

    Raises:
        PeerLost, StaleRowError: a row did not come from any of its units.
        WireError: what came is not what was asked for.
    """
    found: list[Found] = []
    left = np.arange(len(wanted.rows))
    error: TailraceError = WireError("the controller has named no unit for a row")
    for units in wanted.units.T:
        numbers = units[left]
        asked = {number: left[numbers == number] for number in np.unique(numbers).tolist() if number != NO_UNIT}
        known = yield from session.directory.units(asked, otherwise=otherwise)
        reached = {number: unit for number, unit in known.items() if isinstance(unit, Unit)}
        calls = [_read_call(session, wanted, asked[number], unit) for number, unit in reached.items()]
        outcomes = yield Step(calls, otherwise)
        failures = {number: unit for number, unit in known.items() if isinstance(unit, TailraceError)}
        lost = [left[numbers == NO_UNIT]]
        refusals: list[TailraceError] = []
        for number, outcome in (failures | dict(zip(reached, outcomes, strict=True))).items():
            try:
                if isinstance(outcome, TailraceError):
                    raise outcome
                found.append(_open(session, wanted, asked[number], reached[number], outcome))
            except (PeerLost, StaleRowError) as failure:
                error = failure
                lost.append(asked[number])
                session.directory.forget(number)
            except TailraceError as failure:
                refusals.append(failure)  # not raised before every answer was opened: its pin would never be due
        if refusals:
            raise refusals[0]
        left = np.concatenate(lost)
        if not left.size:
            return found
    raise error


def said(cells: Inline, wanted: Wanted) -> Found:
    """Wanted cells that the controller knew.

    Raises:
        WireError: they are not what was asked for.
    """
    starts = unpack(cells.starts, 1)
    places = np.column_stack([np.zeros_like(starts), starts])  # all of them in the one piece of memory
    return _found(wanted, np.arange(len(wanted.rows)), cells.lengths, places, [frame_memory(cells.data)])


def _read_call(session: Session, wanted: Wanted, index: IntArray, unit: Unit) -> Call:
    rows, tags = pack(wanted.rows[index]), pack(wanted.tags[index])
    return Call(endpoint(unit), Read(rows, wanted.columns, tags, session.memory.is_shared(unit)))


def _open(session: Session, wanted: Wanted, index: IntArray, unit: Unit, reply: Reply) -> Found:
    cells = expect(reply, Cells)
    memories = session.memory.open(unit, cells, reply.frames)
    return _found(wanted, index, cells.lengths, unpack(cells.places, 2), memories)


def _found(wanted: Wanted, index: IntArray, packed: bytes, places: IntArray, memories: list[memoryview]) -> Found:
    """`packed`: the lengths [k, c]; `places` [k * c, 2].

    Raises:
        WireError: they are not of that shape.
    """
    shape, lengths = (len(index), len(wanted.columns)), unpack(packed, 1)
    if not len(lengths) == len(places) == shape[0] * shape[1]:
        raise WireError(f"got {len(lengths)} cells in {len(places)} places, asked for {shape[0]} x {shape[1]}")
    return Found(index, lengths.reshape(shape), places.reshape(*shape, 2), memories)
