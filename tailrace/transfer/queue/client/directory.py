"""Where the controller and the units of a queue are.

Who waits on whom: an operation on a controller that was started anew, for as long as a unit that it does not know may
still come back to it; the controller ends that by its own limit.
"""

from collections.abc import Callable, Collection, Iterable, Sequence

from tailrace.errors import PeerLost, TailraceError, WireError
from tailrace.transfer.queue.messages import ReadTable, Table, Unit
from tailrace.transfer.wire.calls import Call, Operation, Step, ask
from tailrace.transfer.wire.sockets import reachable

_RECOVERING_S = 0.2
"""Between questions to a controller that does not know all units again yet."""


class Directory:
    """Of one client."""

    def __init__(self, controller: str, *, dropped: Callable[[Unit], None] = lambda unit: None) -> None:
        """`controller`: its endpoint. `dropped`: a unit was forgotten, or is none (of this kind) any more."""
        self.controller = controller
        self._dropped = dropped
        self._units: dict[int, Unit] = {}

    def read_table(self, *, otherwise: Sequence[Call] = ()) -> Operation[Table]:
        """Ask the controller for units, columns and tasks."""
        table = yield from ask(Call(self.controller, ReadTable()), Table, otherwise=otherwise)
        listed = {unit.number: unit for unit in table.units}
        for number, unit in list(self._units.items()):
            if unit != listed.get(number) and not (table.recovering and number not in listed):
                self.forget(number)
        self._units |= listed
        return table

    def units(
        self, numbers: Iterable[int], *, otherwise: Sequence[Call] = ()
    ) -> Operation[dict[int, Unit | TailraceError]]:
        """Units by their numbers, or why one cannot be asked. The controller is asked where one is not known."""
        numbers = list(numbers)
        wanted = set(numbers)
        if not wanted <= self._units.keys():
            table = yield from self.read_table(otherwise=otherwise)
            while table.recovering and not wanted <= self._units.keys():
                yield Step([], otherwise, pause_s=_RECOVERING_S)
                table = yield from self.read_table(otherwise=otherwise)
        return {number: self._find(number) for number in numbers}

    @property
    def known(self) -> Collection[Unit]:
        """The units that it knows now."""
        return self._units.values()

    def forget(self, number: int) -> None:
        """A unit did not answer: ask the controller next time, it may be elsewhere by now."""
        unit = self._units.pop(number, None)
        if unit is not None:
            self._dropped(unit)

    def _find(self, number: int) -> Unit | TailraceError:
        unit = self._units.get(number)
        if unit is None:
            return PeerLost(f"unit {number} is gone; the units of the queue are {sorted(self._units)}")
        if not reachable(unit.endpoints, unit.host):
            return WireError(f"unit {number} listens at {unit.endpoints} alone, which cannot be reached from this host")
        return unit


def endpoint(unit: Unit) -> str:
    """Where to reach a unit that a directory has found."""
    return reachable(unit.endpoints, unit.host)[0]
