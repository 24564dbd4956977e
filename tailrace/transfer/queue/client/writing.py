"""Parts to units: what a put, an ack and a restored snapshot have in common.

    measured rows ──▶ Batch: runs of consecutive rows with cells in the same columns ──▶ frames, or shared memory

    [Reserve to units whose memory is shared] ─▶ cells are written there ─▶ [Write to all units]

Parts go through the memory of units on this host where it is worth asking for room first, else as frames.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tailrace.errors import PeerLost, TailraceError
from tailrace.transfer.queue.cells import Parts, write_rows
from tailrace.transfer.queue.client.directory import endpoint
from tailrace.transfer.queue.client.session import Session
from tailrace.transfer.queue.messages import NO_VERSION, Done, Reserve, Reserved, Run, Unit, Write, pack
from tailrace.transfer.queue.rows.schema import oldest_version
from tailrace.transfer.wire.calls import Call, Meanwhile, Operation, Step, expect, wait
from tailrace.transfer.wire.frames import MAX_FRAME_BYTES
from tailrace.transfer.wire.messages import Accepted
from tailrace.types import Value


class Batch:
    """Parts for some rows, to be written to one unit or several. Its arrays are the caller's until it has been."""

    def __init__(self, parts: Iterable[Parts], *, frame_bytes: int = MAX_FRAME_BYTES) -> None:
        """`frame_bytes`: at most so many in one run, except one of a single row."""
        self._parts = [piece for alike in parts for piece in _cut(alike, frame_bytes)]
        self.nbytes = sum(alike.nbytes for alike in self._parts)

    def __len__(self) -> int:
        """Rows."""
        return sum(map(len, self._parts))

    @cached_property
    def runs(self) -> list[Run]:
        """Of all rows, in their order."""
        return [Run(len(alike), list(alike.columns), pack(alike.lengths)) for alike in self._parts]

    @cached_property
    def frames(self) -> list[memoryview]:
        """One for each run: its parts, one after the other."""
        frames = []
        for alike in self._parts:
            frame = np.empty(alike.nbytes, np.uint8).data
            write_rows([alike], frame)
            frames.append(frame)
        return frames

    def write(self, memory: memoryview) -> None:
        """Write all parts one after the other to `memory`: `nbytes` writable bytes."""
        write_rows(self._parts, memory)

    def take(self, places: Sequence[int]) -> "Batch":
        """The rows at these places, which ascend."""
        if len(places) == len(self):
            return self
        taken, first = [], 0
        for alike in self._parts:
            own = [place - first for place in places if first <= place < first + len(alike)]
            taken += [alike.take(own)] if own else []
            first += len(alike)
        return Batch(taken)


def _cut(parts: Parts, frame_bytes: int) -> Iterator[Parts]:
    """Pieces of at most so many bytes, except one of a single row."""
    first, nbytes = 0, 0
    if parts.nbytes > frame_bytes:
        for place, size in enumerate(parts.sizes.tolist()):
            if place > first and nbytes + size > frame_bytes:
                yield parts.take(range(first, place))
                first, nbytes = place, 0
            nbytes += size
    yield parts.take(range(first, len(parts))) if first else parts


class Reservations:
    """Room in the memory of units on this host, for parts that are written there before it is said whose they are.

        reserve ──Reserve──▶ unit ──Reserved──▶ room ──fill: parts are written──▶ Write names it
                                                    └────────────────────────────▶ Done gives it back

    Those of one write.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._reserved: dict[int, tuple[Unit, Reserved]] = {}
        """By unit."""
        self._empty: list[tuple[Batch, memoryview]] = []
        """What is to be written, and where."""

    @property
    def numbers(self) -> Set[int]:
        """The units that have reserved some."""
        return self._reserved.keys()

    def reserve(
        self,
        units: Mapping[int, Unit],
        batches: Mapping[int, Batch],
        *,
        otherwise: Sequence[Call] = (),
        meanwhile: Meanwhile = wait,
    ) -> Operation[dict[int, TailraceError]]:
        """Ask those of `units` that have reserved nothing yet for room, where it is worth it; why some have given none.

        One that is lost is forgotten.
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
        """Write the parts to what is still empty."""
        for batch, memory in self._empty:
            batch.write(memory)
        self._empty.clear()

    def named(self, number: int) -> int | None:
        """What this unit calls the room that it has reserved; None where it has not."""
        return self._reserved[number][1].place if number in self.numbers else None

    def give_back(self, *numbers: int) -> None:
        """What these units have reserved is not needed; where that is nothing, there is nothing to do."""
        for number in self.numbers & set(numbers):
            self._session.later.append(_done(*self._reserved.pop(number)))

    def undone(self) -> list[Call]:
        """To be sent where all is broken off."""
        return [_done(unit, reserved) for unit, reserved in self._reserved.values()]


def _done(unit: Unit, reserved: Reserved) -> Call:
    return Call(endpoint(unit), Done([], [reserved.place]))


@dataclass(frozen=True, slots=True, eq=False)
class Writing:
    """For one unit."""

    rows: bytes
    """[n, 2], packed."""
    batch: Batch


def write(
    session: Session,
    tag: int,
    writings: Mapping[int, Writing],
    *,
    otherwise: Sequence[Call] = (),
    reservations: Reservations | None = None,
) -> Operation[dict[int, TailraceError]]:
    """Write to units, by their numbers; the errors of those that it failed at. One that is lost is forgotten.

    `reservations`: those that have the batch already; they are used up.
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
    """[n], packed, see `Admit.versions`."""
    versions = [oldest_version(cells) for cells in rows]
    return pack(np.array([NO_VERSION if version is None else version for version in versions], np.int64))
