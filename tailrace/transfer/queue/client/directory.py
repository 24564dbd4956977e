"""The addresses of a queue's controller and units.

Waiting: after a restart of the controller, an operation waits while the controller recovers and does not know the unit
yet. The controller ends this by a limit of its own.
"""

from collections.abc import Callable, Collection, Iterable, Sequence

from tailrace.errors import PeerLost, TailraceError, WireError
from tailrace.transfer.queue.messages import ReadTable, Table, Unit
from tailrace.transfer.wire.calls import Call, Operation, Step, ask
from tailrace.transfer.wire.sockets import reachable

_RECOVERING_S = 0.2
"""Seconds between questions to a controller that is recovering."""


class Directory:
    """The addresses of a queue's processes, as one client knows them."""

    def __init__(self, controller: str, *, dropped: Callable[[Unit], None] = lambda unit: None) -> None:
        """`controller`: its endpoint. `dropped`: called with a unit that is forgotten, removed or replaced."""
        self.controller = controller
        self._dropped = dropped
        self._units: dict[int, Unit] = {}

    def read_table(self, *, otherwise: Sequence[Call] = ()) -> Operation[Table]:
        """Ask the controller for the queue's units, columns and tasks, and update the known units."""
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
        """Return each unit by its number, or the error why it cannot be used. Unknown units are looked up first."""
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
        """The units that are known now."""
        return self._units.values()

    def forget(self, number: int) -> None:
        """Forget a unit that did not answer. It may have moved, so the next use asks the controller."""
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
    """Return the endpoint at which this host reaches a unit from a directory."""
    return reachable(unit.endpoints, unit.host)[0]
