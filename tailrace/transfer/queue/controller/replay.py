"""Replay of a journal: every decision is carried out again, on a bare control plane, to find the controller's state."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from tailrace.errors import QueueError
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.controller.journal import (
    Base,
    Change,
    ClientWatched,
    Closed,
    GroupsRemade,
    PutAdmitted,
    PutWithdrawn,
    RequestAnswered,
    Restored,
    RowsAcked,
    RowsCopied,
    RowsEntered,
    RowsGone,
    RowsLeased,
    RowsReturned,
    UnitGone,
    UnitNamed,
    UnitRetired,
    VersionAdvanced,
)
from tailrace.transfer.queue.controller.requests import acked_facts, new_facts, new_rows
from tailrace.transfer.queue.messages import Admitted, Answer, pack, row_ids
from tailrace.transfer.queue.policies.base import Policy, RowMeta
from tailrace.transfer.queue.rows.control_plane import ControlPlane
from tailrace.transfer.queue.rows.state import ControlState, RowHeader
from tailrace.transfer.queue.rows.table import QueueTask
from tailrace.transfer.wire.messages import Accepted
from tailrace.transfer.wire.server import Ticket

_ANY = 2**62
"""A bound that no group has reached: the groups were chosen before."""


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """An admission whose rows are not all written yet."""

    record: PutAdmitted
    ids: list[RowId]
    rows: list[RowHeader]


@dataclass(slots=True, eq=False)
class Recovered:
    """The state of a controller at the end of its journal."""

    state: ControlState
    leases: dict[int, RowsLeased] = field(default_factory=dict)
    """The leases by id, each with the rows that it still holds."""
    pending: dict[RowId, Pending] = field(default_factory=dict)
    """The pending admissions, by their first row."""
    units: dict[str, int] = field(default_factory=dict)
    """The numbers of the units, by name."""
    retired: set[int] = field(default_factory=set)
    """The numbers of units that are to leave; some may be dead."""
    watched: dict[str, float] = field(default_factory=dict)
    """The clients that promised signs of life, each with its limit in seconds."""
    answers: dict[Ticket, Answer] = field(default_factory=dict)
    closed: bool = False
    next_unit: int = 0


class _Mute(Policy):
    """A policy that chooses nothing: the journal names the rows that were chosen."""

    def added(self, rows: Sequence[RowMeta], *, leased: bool = False) -> None:
        """Do nothing."""

    def ready(self, row: RowMeta) -> None:
        """Do nothing."""

    def consumed(self, row: RowMeta) -> None:
        """Do nothing."""

    def lost(self, rows: Sequence[RowMeta]) -> None:
        """Do nothing."""

    def take(self, limit: int | None, rank: int | None = None) -> list[RowMeta]:
        """Return no rows."""
        return []


def replay(records: Iterable[Base | Change], tasks: Sequence[QueueTask], *, controllers: int = 1) -> Recovered | None:
    """The state of the controller that wrote `records`; None where there are no records.

    `controllers`: those of the queue, see `ControlPlane`.

    Raises:
        QueueError: they do not begin with a state, or are of another table.
    """
    changes = iter(records)
    base = next(changes, None)
    if base is None:
        return None
    if not isinstance(base, Base):
        raise QueueError("the journal does not begin with a state; is it one of a queue?")
    if base.tasks != [task.spec for task in tasks]:
        raise QueueError(
            f"the journal is of another table, with tasks {[task.name for task in base.tasks]}; "
            f"serve that one, or another directory"
        )
    player = _Player(base, tasks, controllers)
    for change in changes:
        player.play(change)
    return player.end()


class _Player:
    def __init__(self, base: Base, tasks: Sequence[QueueTask], controllers: int) -> None:
        muted = [QueueTask(task.spec, _Mute()) for task in tasks]
        self._plane = ControlPlane(muted, lease_s=0.0, controllers=controllers)
        self._plane.restore(base.state)
        self._found = Recovered(base.state, closed=base.closed, next_unit=base.next_unit)

    def end(self) -> Recovered:
        found = self._found
        found.state = self._plane.export()
        live = {number: self._plane.leased(number) for number in found.leases}
        found.leases = {
            number: msgspec.structs.replace(lease, rows=pack(live[number]))
            for number, lease in found.leases.items()
            if live[number]
        }
        return found

    def play(self, change: Base | Change) -> None:
        found, plane = self._found, self._plane
        match change:
            case PutAdmitted():
                pending = Pending(change, row_ids(change.rows), new_rows(change.request))
                plane.reserve(pending.rows, pending.ids)
                found.pending[pending.ids[0]] = pending
                found.answers[Ticket(change.client, change.number)] = Admitted(change.rows, change.units)
            case RowsEntered():
                pending = found.pending.pop(row_ids(change.rows)[0])
                facts = new_facts(pending.record.request, len(pending.rows))
                plane.enter(pending.ids, pending.rows, facts, units=tuple(change.units))
            case PutWithdrawn():
                pending = found.pending.pop(row_ids(change.rows)[0])
                plane.withdraw(pending.ids, pending.rows)
            case RowsLeased():
                plane.hold(change.lease_id, change.task, row_ids(change.rows), now=0.0)
                found.leases[change.lease_id] = change
            case RowsAcked():
                facts_by_row = acked_facts(change.request)
                plane.ack(change.request.lease_id, facts_by_row, missed=change.request.missed)
                found.answers[Ticket(change.client, change.number)] = Accepted()
            case RowsReturned(expired=True):
                plane.end(change.lease_id)
            case RowsReturned():
                plane.nack(change.lease_id, row_ids(change.rows))
            case RowsCopied():
                plane.copied(change.unit, row_ids(change.rows))
            case UnitGone() | RowsGone() | GroupsRemade():
                self._lose(change)
            case _:
                self._note(change)

    def _lose(self, change: UnitGone | RowsGone | GroupsRemade) -> None:
        found, plane = self._found, self._plane
        match change:
            case UnitGone():
                plane.lose(change.unit)
                found.units = {name: number for name, number in found.units.items() if number != change.unit}
            case RowsGone():
                plane.lose(change.unit, row_ids(change.rows))
            case GroupsRemade():
                plane.remake(change.lease_id, change.groups, _ANY)
                found.answers[Ticket(change.client, change.number)] = change.answer

    def _note(self, change: Base | Change) -> None:
        found = self._found
        match change:
            case Restored():
                self._plane.restore(change.state)
            case VersionAdvanced():
                self._plane.advance(change.version)
            case UnitNamed():
                found.units[change.name] = change.unit
                found.next_unit = max(found.next_unit, change.unit + 1)
            case UnitRetired():
                found.retired.add(change.unit)
            case ClientWatched():
                found.watched[change.client] = change.limit_s
            case RequestAnswered():
                found.answers[Ticket(change.client, change.number)] = change.answer
            case Closed():
                found.closed = True
