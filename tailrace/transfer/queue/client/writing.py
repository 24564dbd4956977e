"""Parts to units: through the memory of those on this host, where it is worth asking for a place, else as frames.

[Reserve to units whose memory is shared] ─▶ cells are written there ─▶ [Write to all units]
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tailrace.errors import PeerLost, TailraceError
from tailrace.transfer.queue.client.batch import Batch
from tailrace.transfer.queue.client.session import Session
from tailrace.transfer.queue.wire.calls import Call, Operation, Step, endpoint, expect
from tailrace.transfer.queue.wire.messages import Accepted, Done, Reserve, Reserved, Unit, Write


@dataclass(frozen=True, slots=True, eq=False)
class Writing:
    """For one unit."""

    rows: bytes
    """[n, 2], packed."""
    batch: Batch


def write(
    session: Session, tag: int, writings: Mapping[int, Writing], *, otherwise: Sequence[Call] = ()
) -> Operation[dict[int, TailraceError]]:
    """Write to units, by their numbers; the errors of those that it failed at. One that is lost is forgotten."""
    failed: dict[int, TailraceError] = {}
    units: dict[int, Unit] = {}
    for number, found in (yield from session.directory.units(writings, otherwise=otherwise)).items():
        if isinstance(found, TailraceError):
            failed[number] = found
        else:
            units[number] = found
    places = yield from _reserve(session, units, writings, failed, otherwise)
    calls = {
        number: _write_call(tag, unit, writings[number], places.get(number))
        for number, unit in units.items()
        if number not in failed
    }
    undo = [_abandon(units[number], place) for number, place in places.items()]
    outcomes = yield Step(list(calls.values()), [*otherwise, *undo])
    for number, outcome in zip(calls, outcomes, strict=True):
        try:
            expect(outcome, Accepted)
        except TailraceError as error:
            failed[number] = error
            if number in places:
                session.later.append(_abandon(units[number], places[number]))
    for number in failed:
        if isinstance(failed[number], PeerLost):
            session.directory.forget(number)
    return failed


def _reserve(
    session: Session,
    units: Mapping[int, Unit],
    writings: Mapping[int, Writing],
    failed: dict[int, TailraceError],
    otherwise: Sequence[Call],
) -> Operation[dict[int, Reserved]]:
    """Places with the parts in them, by unit; adds to `failed`."""
    sizes = {number: writings[number].batch.nbytes for number in units}
    shared = [number for number, unit in units.items() if session.memory.is_worthwhile(unit, sizes[number])]
    if not shared:
        return {}
    outcomes = yield Step([Call(endpoint(units[number]), Reserve(sizes[number])) for number in shared], otherwise)
    places: dict[int, Reserved] = {}
    for number, outcome in zip(shared, outcomes, strict=True):
        try:
            places[number] = expect(outcome, Reserved)
            writings[number].batch.write(session.memory.writable(units[number], places[number], sizes[number]))
        except TailraceError as error:
            failed[number] = error
            if number in places:
                session.later.append(_abandon(units[number], places.pop(number)))
    return places


def _write_call(tag: int, unit: Unit, writing: Writing, place: Reserved | None) -> Call:
    batch = writing.batch
    if place is not None:
        return Call(endpoint(unit), Write(tag, writing.rows, batch.runs, place.place))
    return Call(endpoint(unit), Write(tag, writing.rows, batch.runs, None), batch.frames)


def _abandon(unit: Unit, place: Reserved) -> Call:
    return Call(endpoint(unit), Done([], [place.place]))
