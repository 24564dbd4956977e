"""Room in the memory of units on this host, for parts that are written there before it is said whose they are.

ask ──Reserve──▶ unit ──Reserved──▶ heard: parts are written there ──▶ Write names the place
                                                              └──────▶ Done gives it back
"""

from collections.abc import Mapping, Set

from tailrace.errors import PeerLost, TailraceError
from tailrace.transfer.queue.client.batch import Batch
from tailrace.transfer.queue.client.session import Session
from tailrace.transfer.queue.wire.calls import Call, Outcome, endpoint, expect
from tailrace.transfer.queue.wire.messages import Done, Reserve, Reserved, Unit


class Places:
    """Those of one write."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._asked: list[tuple[Unit, Batch]] = []
        self._reserved: dict[int, tuple[Unit, Reserved]] = {}
        """By unit."""
        self.failed: dict[int, TailraceError] = {}
        """Units of those asked last that have given none, and why. One that is lost is forgotten."""

    @property
    def numbers(self) -> Set[int]:
        """The units that have one."""
        return self._reserved.keys()

    def ask(self, units: Mapping[int, Unit], batches: Mapping[int, Batch]) -> list[Call]:
        """What to ask those of `units` that have no place yet, where it is worth it; `heard` is to hear the outcomes.

        `batches`: what is to be written, by unit.
        """
        self.failed = {}
        self._asked = [
            (unit, batches[number])
            for number, unit in units.items()
            if number not in self.numbers and self._session.memory.is_worthwhile(unit, batches[number].nbytes)
        ]
        return [Call(endpoint(unit), Reserve(batch.nbytes)) for unit, batch in self._asked]

    def heard(self, place: int, outcome: Outcome) -> None:
        """See `Step.heard`: of a step that begins with what was asked."""
        if place >= len(self._asked):
            return
        unit, batch = self._asked[place]
        try:
            self._reserved[unit.number] = unit, expect(outcome, Reserved)
            batch.write(self._session.memory.writable(*self._reserved[unit.number], batch.nbytes))
        except TailraceError as error:
            self.failed[unit.number] = error
            self.give_back(unit.number)
            if isinstance(error, PeerLost):
                self._session.directory.forget(unit.number)

    def named(self, number: int) -> int | None:
        """What to call the place at this unit, where there is one."""
        return self._reserved[number][1].place if number in self.numbers else None

    def give_back(self, *numbers: int) -> None:
        """The places at these units are not needed; where there is none, there is nothing to do."""
        for number in self.numbers & set(numbers):
            self._session.later.append(_done(*self._reserved.pop(number)))

    def undone(self) -> list[Call]:
        """To be sent where all is broken off."""
        return [_done(unit, reserved) for unit, reserved in self._reserved.values()]


def _done(unit: Unit, reserved: Reserved) -> Call:
    return Call(endpoint(unit), Done([], [reserved.place]))
