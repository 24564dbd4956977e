"""Writes parts to units, for a put, an ack and the restore of a snapshot.

    measured rows ──▶ Batch: runs of consecutive rows with cells in the same columns ──▶ frames, or shared memory

    [Reserve to units whose memory is shared] ─▶ cells are written there ─▶ [Write to all units]

Parts go through the memory of units on this host if they are large enough to reserve room first, else as frames.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tailrace.errors import PeerLost, TailraceError
from tailrace.transfer.queue.cells import Parts, join_cells, write_rows
from tailrace.transfer.queue.client.directory import endpoint
from tailrace.transfer.queue.client.session import Session
from tailrace.transfer.queue.messages import NO_VERSION, Done, Reserve, Reserved, Run, Unit, Write, pack
from tailrace.transfer.queue.rows.schema import oldest_version
from tailrace.transfer.wire.calls import Call, Meanwhile, Operation, Step, expect, wait
from tailrace.transfer.wire.frames import MAX_FRAME_BYTES
from tailrace.transfer.wire.messages import Accepted
from tailrace.types import Value


class Batch:
    """Parts for some rows, to be written to one unit or several. The caller must not change the arrays before that."""

    def __init__(self, parts: Iterable[Parts], *, frame_bytes: int = MAX_FRAME_BYTES) -> None:
        """`frame_bytes`: the most bytes in one run, except for a run of a single row."""
        self._parts = [piece for alike in parts for piece in _cut(alike, frame_bytes)]
        self.nbytes = sum(alike.nbytes for alike in self._parts)

    def __len__(self) -> int:
        """The number of rows."""
        return sum(map(len, self._parts))

    @cached_property
    def runs(self) -> list[Run]:
        """The runs of all rows, in their order."""
        return [Run(len(alike), list(alike.columns), pack(alike.lengths)) for alike in self._parts]

    @cached_property
    def frames(self) -> list[memoryview]:
        """A frame for each run: its parts, one after the other."""
        frames = []
        for alike in self._parts:
            frame = np.empty(alike.nbytes, np.uint8).data
            write_rows([alike], frame)
            frames.append(frame)
        return frames

    def to_bytes(self) -> bytes:
        """Return all parts, one after the other. For a few cells this is quicker than `frames`."""
        return join_cells(chunk for alike in self._parts for chunks in alike.chunks for chunk in chunks)

    def write(self, memory: memoryview) -> None:
        """Write all parts one after the other to `memory`, which has `nbytes` bytes."""
        write_rows(self._parts, memory)

    def take(self, places: Sequence[int]) -> "Batch":
        """Return a batch of the rows at `places`, which must ascend."""
        if len(places) == len(self):
            return self
        taken, first = [], 0
        for alike in self._parts:
            own = [place - first for place in places if first <= place < first + len(alike)]
            taken += [alike.take(own)] if own else []
            first += len(alike)
        return Batch(taken)


def _cut(parts: Parts, frame_bytes: int) -> Iterator[Parts]:
    """Split parts into pieces of at most `frame_bytes` bytes, except for a single row."""
    first, nbytes = 0, 0
    if parts.nbytes > frame_bytes:
        for place, size in enumerate(parts.sizes):
            if place > first and nbytes + size > frame_bytes:
                yield parts.take(range(first, place))
                first, nbytes = place, 0
            nbytes += size
    yield parts.take(range(first, len(parts))) if first else parts


class Reservations:
    """The reservations of one write: room in the memory of units on this host.

        reserve ──Reserve──▶ unit ──Reserved──▶ room ──fill: parts are written──▶ Write names it
                                                    └────────────────────────────▶ Done gives it back

    Parts are written to the room before a message says which rows they belong to.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._reserved: dict[int, tuple[Unit, Reserved]] = {}
        """Each unit and its answer, by the unit's number."""
        self._empty: list[tuple[Batch, memoryview]] = []
        """The batches that are still to be written, each with its memory."""

    @property
    def numbers(self) -> Set[int]:
        """The numbers of the units that have reserved room."""
        return self._reserved.keys()

    def reserve(
        self,
        units: Mapping[int, Unit],
        batches: Mapping[int, Batch],
        *,
        otherwise: Sequence[Call] = (),
        meanwhile: Meanwhile = wait,
    ) -> Operation[dict[int, TailraceError]]:
        """Reserve room at those of `units` that have none reserved yet, if the batch is worth it.

        Return the errors of the units that gave none, by number. A lost unit is forgotten.
        """
        asked = {
            number: Call(endpoint(unit), Reserve(batches[number].nbytes))
            for number, unit in units.items()
            if number not in self.numbers and self._session.memory.is_worthwhile(unit, batches[number].nbytes)
        }
        if not asked:
            return {}
        outcomes = yield Step(list(asked.values()), [*otherwise, *self.undone()], meanwhile=meanwhile)
        failed: dict[int, TailraceError] = {}
        for number, outcome in zip(asked, outcomes, strict=True):
            batch, unit = batches[number], units[number]
            try:
                reserved = expect(outcome, Reserved)
                self._reserved[number] = unit, reserved
                self._empty.append((batch, self._session.memory.writable(unit, reserved, batch.nbytes)))
            except TailraceError as error:
                failed[number] = error
                if isinstance(error, PeerLost):
                    self._session.directory.forget(number)
        self.give_back(*failed)
        return failed

    def fill(self) -> None:
        """Write the parts to the rooms that are still empty."""
        for batch, memory in self._empty:
            batch.write(memory)
        self._empty.clear()

    def named(self, number: int) -> int | None:
        """The unit's name for the room that it reserved; None if it reserved none."""
        return self._reserved[number][1].place if number in self.numbers else None

    def give_back(self, *numbers: int) -> None:
        """Give back the room that these units reserved, if any."""
        for number in self.numbers & set(numbers):
            self._session.later.append(_done(*self._reserved.pop(number)))

    def undone(self) -> list[Call]:
        """The calls that give back all rooms, to send if the write is cancelled."""
        return [_done(unit, reserved) for unit, reserved in self._reserved.values()]


def _done(unit: Unit, reserved: Reserved) -> Call:
    return Call(endpoint(unit), Done([], [reserved.place]))


@dataclass(frozen=True, slots=True, eq=False)
class Writing:
    """The rows and parts to write to one unit."""

    rows: bytes
    """[n, 2] slot and generation, packed."""
    batch: Batch


def write(
    session: Session,
    tag: int,
    writings: Mapping[int, Writing],
    *,
    otherwise: Sequence[Call] = (),
    reservations: Reservations | None = None,
) -> Operation[dict[int, TailraceError]]:
    """Write to units, by their numbers. Return the errors of the units that failed. A lost unit is forgotten.

    `tag`: 0 for a put, else the lease. `reservations`: rooms that are reserved for the batch already; they are used up.
    """
    reservations = reservations or Reservations(session)
    reservations.give_back(*reservations.numbers - writings.keys())
    failed: dict[int, TailraceError] = {}
    units: dict[int, Unit] = {}
    found = yield from session.directory.units(writings, otherwise=[*otherwise, *reservations.undone()])
    for number, unit in found.items():
        if isinstance(unit, TailraceError):
            failed[number] = unit
        else:
            units[number] = unit
    batches = {number: writings[number].batch for number in units}
    failed |= yield from reservations.reserve(units, batches, otherwise=otherwise)
    reservations.fill()
    calls = {
        number: _write_call(tag, unit, writings[number], reservations.named(number))
        for number, unit in units.items()
        if number not in failed
    }
    outcomes = yield Step(list(calls.values()), [*otherwise, *reservations.undone()])
    for number, outcome in zip(calls, outcomes, strict=True):
        try:
            expect(outcome, Accepted)
        except TailraceError as error:
            failed[number] = error
    reservations.give_back(*failed)
    for number in failed:
        if isinstance(failed[number], PeerLost):
            session.directory.forget(number)
    return failed


def _write_call(tag: int, unit: Unit, writing: Writing, place: int | None) -> Call:
    batch = writing.batch
    frames = batch.frames if place is None else ()
    return Call(endpoint(unit), Write(tag, writing.rows, batch.runs, place), frames)


def packed_versions(rows: Iterable[Mapping[str, Value]]) -> bytes:
    """Return the oldest weight version of each row, [n] packed, see `Admit.versions`."""
    versions = [oldest_version(cells) for cells in rows]
    return pack(np.array([NO_VERSION if version is None else version for version in versions], np.int64))
