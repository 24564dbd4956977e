"""Room in the memory of units on this host, for parts that are written there before it is said whose they are.

reserve ──Reserve──▶ unit ──Reserved──▶ place ──fill: parts are written──▶ Write names it
                                            └────────────────────────────▶ Done gives it back
"""

from collections.abc import Mapping, Sequence, Set

from tailrace.errors import PeerLost, TailraceError
from tailrace.transfer.queue.client.batch import Batch
from tailrace.transfer.queue.client.directory import endpoint
from tailrace.transfer.queue.client.session import Session
from tailrace.transfer.queue.messages import Done, Reserve, Reserved, Unit
from tailrace.transfer.wire.calls import Call, Meanwhile, Operation, Step, expect, wait


class Places:
    """Those of one write."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._reserved: dict[int, tuple[Unit, Reserved]] = {}
        """By unit."""
        self._empty: list[tuple[Batch, memoryview]] = []
        """What is to be written, and where."""

    @property
    def numbers(self) -> Set[int]:
        """The units that have one."""
        return self._reserved.keys()

    def reserve(
        self,
        units: Mapping[int, Unit],
        batches: Mapping[int, Batch],
        *,
        otherwise: Sequence[Call] = (),
        meanwhile: Meanwhile = wait,
    ) -> Operation[dict[int, TailraceError]]:
        """Ask those of `units` that have no place yet, where it is worth it, for one; why some have given none.

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
        """Write the parts to places that are still empty."""
        for batch, memory in self._empty:
            batch.write(memory)
        self._empty.clear()

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
