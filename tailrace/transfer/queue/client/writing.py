"""Parts to units: through the memory of those on this host, where it is worth asking for a place, else as frames.

[Reserve to units whose memory is shared] ─▶ cells are written there ─▶ [Write to all units]
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tailrace.errors import PeerLost, TailraceError
from tailrace.transfer.queue.client.batch import Batch
from tailrace.transfer.queue.client.directory import endpoint
from tailrace.transfer.queue.client.places import Places
from tailrace.transfer.queue.client.session import Session
from tailrace.transfer.queue.messages import Unit, Write
from tailrace.transfer.wire.calls import Call, Operation, Step, expect
from tailrace.transfer.wire.messages import Accepted


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
    places: Places | None = None,
) -> Operation[dict[int, TailraceError]]:
    """Write to units, by their numbers; the errors of those that it failed at. One that is lost is forgotten.

    `places`: those that have the batch already; they are used up.
    """
    places = places or Places(session)
    places.give_back(*places.numbers - writings.keys())
    failed: dict[int, TailraceError] = {}
    units: dict[int, Unit] = {}
    found = yield from session.directory.units(writings, otherwise=[*otherwise, *places.undone()])
    for number, unit in found.items():
        if isinstance(unit, TailraceError):
            failed[number] = unit
        else:
            units[number] = unit
    batches = {number: writings[number].batch for number in units}
    failed |= yield from places.reserve(units, batches, otherwise=otherwise)
    places.fill()
    calls = {
        number: _write_call(tag, unit, writings[number], places.named(number))
        for number, unit in units.items()
        if number not in failed
    }
    outcomes = yield Step(list(calls.values()), [*otherwise, *places.undone()])
    for number, outcome in zip(calls, outcomes, strict=True):
        try:
            expect(outcome, Accepted)
        except TailraceError as error:
            failed[number] = error
    places.give_back(*failed)
    for number in failed:
        if isinstance(failed[number], PeerLost):
            session.directory.forget(number)
    return failed


def _write_call(tag: int, unit: Unit, writing: Writing, place: int | None) -> Call:
    batch = writing.batch
    frames = batch.frames if place is None else ()
    return Call(endpoint(unit), Write(tag, writing.rows, batch.runs, place), frames)
