"""The storage units of a queue, as its controller sees them, and the rows that they store.

    Join ──▶ new: link to it, ask for its Inventory ──Parts──▶ ready ──silent for a while──▶ dead
    Join of a known unit: a sign of life

Waiting: no request waits for a unit. Rows and parts that a unit need not store any more are collected while messages
are at hand, and then sent to it. A unit that is away misses them; its inventory makes up for that when it comes back.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np

from tailrace.errors import QueueClosed, TailraceError, UserError, WireError
from tailrace.transfer.queue.base import RowId, UnitStats
from tailrace.transfer.queue.controller.inline_cells import InlineCells
from tailrace.transfer.queue.controller.journal import Journal, UnitNamed, UnitRetired
from tailrace.transfer.queue.controller.waiting import Timer, Timers
from tailrace.transfer.queue.messages import STORAGE_UNIT, Inventory, Join, Parts, Settle, Unit, Write, pack, unpack
from tailrace.transfer.queue.rows.control_plane import ControlPlane
from tailrace.transfer.queue.storage.base import PartId, first_number
from tailrace.transfer.wire.calls import Call, expect
from tailrace.transfer.wire.connection import Connection, Then
from tailrace.transfer.wire.frames import Buffer, Reply
from tailrace.transfer.wire.messages import Message
from tailrace.transfer.wire.server import Server
from tailrace.transfer.wire.sockets import reachable

_FULL_S = 5.0
"""Seconds in which a unit that had no room is written to after all others."""
_SETTLE_AT_ONCE = 4096
"""So many rows and parts are sent to the unit at once, and not collected further."""

StoredParts: TypeAlias = Mapping[RowId, Mapping[int, Sequence[str]]]
"""The rows of a unit, by row id; for each row, the columns of its parts, by tag."""


@dataclass(slots=True, eq=False)
class KnownUnit:
    """A unit that has joined, or that is expected to join again."""

    number: int
    name: str
    join: Join | None = None
    link: Connection | None = None
    endpoint: str = ""
    leaving: bool = False
    """Whether it is to leave: no more rows are written to it, and its rows are copied to others."""
    ready: bool = False
    """Whether it has sent its inventory: rows may be written to it and read from it."""
    max_bytes: int = 0
    """The bytes that it can hold."""
    rows: int = 0
    bytes: int = 0
    """The bytes of its rows, as far as the controller knows."""
    full_until: float = -math.inf
    """The time until which others are written to before it, since it had no room."""
    deadline: Timer | None = None
    settle: Timer | None = None
    lost_parts: list[PartId] = field(default_factory=list)
    left_rows: list[RowId] = field(default_factory=list)


class UnitObserver(Protocol):
    """The interface by which a unit's changes of state are reported."""

    def unit_listed(self, unit: KnownUnit, expected: StoredParts, listed: set[PartId]) -> None:
        """Take in a unit's inventory, `listed`; it is ready now. `expected`: the parts due when it was asked."""

    def unit_leaves(self) -> None:
        """Take in that a unit is to leave, so that its rows have to be copied."""

    def unit_died(self, unit: KnownUnit) -> None:
        """Take in that a unit died or has left: it was silent for too long, or restarted without its rows. It is
        removed."""


class Units:
    """All units, by number."""

    def __init__(
        self,
        server: Server,
        timers: Timers,
        *,
        limit_s: float,
        journal: Journal,
        control: ControlPlane,
        observer: UnitObserver,
    ) -> None:
        """`limit_s`: seconds of silence after which a unit is dead."""
        self._server = server
        self._timers = timers
        self._limit_s = limit_s
        self._journal = journal
        self._control = control
        self._observer = observer
        self._units: dict[int, KnownUnit] = {}
        self._names: dict[str, KnownUnit] = {}
        self._leaving: set[int] = set()
        self._expected: list[KnownUnit] = []
        """The units from before the controller restarted that have not come back."""
        self.next_number = 0
        """The number of the next unit. Numbers of dead units are not used again: clients may still know them."""

    def get(self, number: int) -> KnownUnit | None:
        """The unit with this number, if there is one."""
        return self._units.get(number)

    @property
    def ready(self) -> int:
        """The number of units that may be written to."""
        return sum(unit.ready for unit in self._units.values())

    @property
    def staying(self) -> list[KnownUnit]:
        """The units that may be written to and are not to leave."""
        return [unit for unit in self._units.values() if unit.ready and not unit.leaving]

    @property
    def leaving(self) -> Collection[int]:
        """The numbers of the units that are to leave."""
        return self._leaving

    @property
    def largest(self) -> int:
        """The bytes that the largest of the joined units can hold."""
        return max((unit.max_bytes for unit in self._units.values()), default=0)

    @property
    def recovering(self) -> bool:
        """Whether a unit with rows has not come back after a restart and still may; until then no request is served."""
        return bool(self._expected) and any(unit.rows for unit in self._expected)

    def expect(self, number: int, name: str, *, leaving: bool) -> None:
        """Expect a unit from before the controller restarted. It counts as dead if it does not join in time."""
        unit = self._add(number, name)
        if leaving:
            unit.leaving = True
            self._leaving.add(number)
        self._expected.append(unit)
        self._watch(unit)

    def join(self, message: Join) -> KnownUnit:
        """Take in a Join: a new unit, a restarted one, or a sign of life.

        Raises:
            WireError: the unit cannot be reached from here.
        """
        unit = self._names.get(message.name)
        leaves = message.leaving or (unit is not None and unit.leaving)  # a restarted one was not asked itself
        if unit is not None and unit.join is not None and unit.join.incarnation != message.incarnation:
            self._retire(unit, lasting=message.lasting)
            unit = self._names.get(message.name)
        if unit is None:
            unit = self._add(self.next_number, message.name)
            self._journal.append(UnitNamed(unit.number, unit.name))
        if unit not in self._expected:  # an expected unit has one deadline: to have sent its inventory by then
            self._watch(unit)
        if unit.link is None:
            self._connect(unit, message)
        if leaves:
            self._let_leave(unit)
        return unit

    def retire(self, name: str) -> None:
        """Have a unit leave; harmless where it is to leave already.

        Raises:
            UserError: there is no such unit, or it is the last. A unit from before the controller restarted counts,
                though it has not come back yet.
        """
        unit = self._names.get(name)
        if unit is None:
            raise UserError(f"the queue has no unit {name!r}; its units are {', '.join(self._names)}")
        if not any(other is not unit and not other.leaving for other in self._units.values()):
            raise UserError(f"{name} is the last unit of the queue; add another one first")
        self._let_leave(unit)

    def release(self, unit: KnownUnit) -> None:
        """Let a unit go that is to leave, and whose rows are all on others."""
        self._die(unit)

    def described(self, unit: KnownUnit) -> Unit:
        """A unit that has joined, as others see it."""
        assert unit.join is not None, "it has joined"
        return Unit(unit.number, unit.join.endpoints, unit.join.host, unit.join.directory)

    def choose(
        self,
        nbytes: int,
        replicas: int,
        *,
        preferred: Collection[int] = (),
        full: Collection[int] = (),
        apart: Collection[int] = (),
        staying: bool = False,
    ) -> list[KnownUnit]:
        """Choose units for rows of `nbytes`: the emptiest ones that have room; none where too few have room.

        Units that are to leave are chosen only where there are no others, and with `staying` not even then. Units in
        `apart` are not chosen.

        `preferred` units are chosen even where they hold up to `nbytes` more than others. `full` units, and those that
        were full a moment ago, come after all others: a unit may have less room than the controller knows of, such as
        when its machine has less memory.
        """
        now = self._server.now

        ready = self.staying or [unit for unit in self._units.values() if unit.ready and not staying]
        if apart:
            ready = [unit for unit in ready if unit.number not in apart]
        fit = [unit for unit in ready if unit.max_bytes - unit.bytes >= nbytes]
        wanted = min(replicas, len(ready))
        if len(fit) < wanted:
            return []

        def taken(unit: KnownUnit) -> tuple[bool, int, bool]:
            is_preferred = unit.number in preferred
            return unit.number in full or now < unit.full_until, unit.bytes - nbytes * is_preferred, not is_preferred

        if len(fit) > 1:
            fit.sort(key=taken)
        return fit[:wanted]

    def note_full(self, number: int) -> None:
        """Note that a unit had no room for a write."""
        if (unit := self._units.get(number)) is not None:
            unit.full_until = self._server.now + _FULL_S

    def write(self, number: int, message: Write, frames: Sequence[Buffer], then: Then) -> None:
        """Write parts to a unit that is ready; `then` is called with the outcome."""
        self.ask(number, message, then, frames)

    def ask(self, number: int, message: Message, then: Then, frames: Sequence[Buffer] = ()) -> None:
        """Send a message to a unit that is ready; `then` is called with the outcome."""
        unit = self._units[number]
        assert unit.link is not None, "units that are ready are linked to"
        unit.link.start(Call(unit.endpoint, message, frames), then)

    def insist(self, number: int, message: Message) -> None:
        """Send a unit a message that it must not miss. Where that fails, its next Join begins with an inventory."""
        unit = self._units.get(number)
        if unit is None or unit.link is None:
            return
        link = unit.link

        def then(result: Reply | TailraceError) -> None:
            if isinstance(result, TailraceError) and not isinstance(result, QueueClosed) and unit.link is link:
                self._disconnect(unit)

        link.start(Call(unit.endpoint, message), then)

    def settle(self, numbers: Iterable[int], *, parts: Collection[PartId] = (), rows: Collection[RowId] = ()) -> None:
        """Tell these units to drop parts that no longer count, and rows that left."""
        for number in numbers:
            unit = self._units.get(number)
            if unit is None or unit.link is None:
                continue
            unit.lost_parts += parts
            unit.left_rows += rows
            if len(unit.lost_parts) + len(unit.left_rows) >= _SETTLE_AT_ONCE:
                self._settle(unit)
            elif unit.settle is None:
                unit.settle = self._timers.at(self._server.now, partial(self._settle, unit))

    def dismiss(self, number: int, parts: Iterable[PartId]) -> None:
        """Tell a unit to drop parts of rows that are not in the queue.

        The unit takes no more parts of rows that have left. Rows that were never in the queue may still come, such as
        those of a snapshot whose restoring broke off.
        """
        left, others = set(), []
        for part in parts:
            row = RowId(*part[:2])
            if self._control.has_left(row):
                left.add(row)
            else:
                others.append(part)
        self.settle([number], parts=others, rows=left)

    def listing(self) -> list[Unit]:
        """The units as clients see them: all that have joined and are not dead, even before their inventory."""
        return [self.described(unit) for unit in self._units.values() if unit.join is not None]

    def stats(self) -> tuple[UnitStats, ...]:
        """The counts of each unit that is there or may come back."""
        return tuple(
            UnitStats(
                number=unit.number,
                name=unit.name,
                alive=unit.ready,
                rows=unit.rows,
                bytes=unit.bytes,
                max_bytes=unit.max_bytes,
            )
            for unit in self._units.values()
        )

    def _add(self, number: int, name: str) -> KnownUnit:
        unit = self._units[number] = self._names[name] = KnownUnit(number, name)
        self.next_number = max(self.next_number, number + 1)
        return unit

    def _let_leave(self, unit: KnownUnit) -> None:
        if not unit.leaving:
            self._journal.append(UnitRetired(unit.number))
            unit.leaving = True
            self._leaving.add(unit.number)
            self._observer.unit_leaves()

    def _watch(self, unit: KnownUnit) -> None:
        if unit.deadline is not None:
            unit.deadline.cancel()
        unit.deadline = self._timers.at(self._server.now + self._limit_s, lambda: self._die(unit))

    def _connect(self, unit: KnownUnit, message: Join) -> None:
        ways = reachable(message.endpoints, message.host)
        if not ways:
            raise WireError(f"unit {message.name!r} listens at {message.endpoints} alone: not reached from here")
        unit.join = message
        unit.max_bytes = message.max_bytes
        unit.endpoint = ways[0]
        unit.link = link = self._server.link(unit.endpoint, peer=STORAGE_UNIT)
        expected = self._control.stored(unit.number)  # read now: more rows may come until the unit answers

        def then(result: Reply | TailraceError) -> None:
            if unit.link is not link:
                return  # the unit has died or restarted meanwhile
            try:
                if isinstance(result, TailraceError):
                    raise result
                listed = _listed(expect(result, Parts))
            except QueueClosed:
                return  # this server stops, and hangs up by itself
            except TailraceError:
                self._disconnect(unit)  # its next Join asks for the inventory again
            else:
                unit.ready = True
                self._expect_no_more(unit)
                self._watch(unit)
                self._observer.unit_listed(unit, expected, listed)

        link.start(Call(unit.endpoint, Inventory()), then)

    def _retire(self, unit: KnownUnit, *, lasting: bool) -> None:
        """Handle the restart of a unit: with a lasting store it is only reconnected, else it counts as dead."""
        if lasting:
            self._disconnect(unit)
        else:
            self._die(unit)

    def _die(self, unit: KnownUnit) -> None:
        if unit.deadline is not None:
            unit.deadline.cancel()
            unit.deadline = None
        self._disconnect(unit)
        self._expect_no_more(unit)
        unit.rows = unit.bytes = 0
        self._leaving.discard(unit.number)
        del self._units[unit.number], self._names[unit.name]  # if it comes back, it is a new unit without rows
        self._observer.unit_died(unit)

    def _expect_no_more(self, unit: KnownUnit) -> None:
        self._expected = [other for other in self._expected if other is not unit]

    def _disconnect(self, unit: KnownUnit) -> None:
        unit.ready = False
        unit.lost_parts.clear()
        unit.left_rows.clear()
        if unit.link is not None:
            self._server.unlink(unit.link)
            unit.link = None

    def _settle(self, unit: KnownUnit) -> None:
        if unit.settle is not None:
            unit.settle.cancel()
            unit.settle = None
        if unit.lost_parts or unit.left_rows:
            parts = np.array(unit.lost_parts, dtype=np.int64).reshape(-1, 3)
            rows = pack(unit.left_rows)
            unit.lost_parts.clear()
            unit.left_rows.clear()
            self.insist(unit.number, Settle(pack(parts), rows))


class UnitAccounts:
    """The rows that have been admitted, their bytes, and the units that store them."""

    def __init__(self, units: Units, cells: InlineCells) -> None:
        """`cells`: copies of the small parts of some rows."""
        self._units = units
        self._cells = cells
        self._sizes: dict[RowId, int] = {}
        self._leftovers: dict[RowId, set[int]] = {}
        """Units that may have some parts of a row and do not count as having it. They drop them when the row leaves."""
        self._holds: dict[int, str] = {}
        self._last_hold = first_number()
        self._held_back: deque[tuple[int, tuple[int, ...], list[RowId]]] = deque()
        """Rows that left while a hold was live: the newest hold at that time, the units, and the rows.

        The units keep the rows until that hold and all older ones are released.
        """
        self.nbytes = 0
        """The bytes of all rows, each row counted once."""

    def add(self, rows: Sequence[RowId], sizes: Sequence[int], units: Collection[int]) -> None:
        """Count rows that `units` store from now on, or that are being written there. `sizes`: bytes of each row."""
        total = sum(sizes)
        self._sizes.update(zip(rows, sizes, strict=True))
        self.nbytes += total
        for number in units:
            self._count(number, len(rows), total)

    def grow(self, row: RowId, nbytes: int, units: Collection[int]) -> None:
        """Count `nbytes` of outputs that were added to a row."""
        self._sizes[row] += nbytes
        self.nbytes += nbytes
        for number in units:
            self._count(number, 0, nbytes)

    def forsake(self, rows: Sequence[RowId], number: int) -> None:
        """Stop counting a unit as having these rows; other units have them."""
        for row in rows:
            self._count(number, -1, -self._sizes[row])
            self.leave_over(row, number)

    def leave_over(self, row: RowId, number: int) -> None:
        """Note that a unit may have parts of a row that it does not count as having.

        They stay until the row leaves: a unit that was told to drop them could drop a copy that comes later.
        """
        self._leftovers.setdefault(row, set()).add(number)

    def copied(self, rows: Sequence[RowId], number: int) -> None:
        """Count a unit as having these rows from now on."""
        for row in rows:
            self._count(number, 1, self._sizes[row])
            self._leftovers[row].discard(number)
            if not self._leftovers[row]:
                del self._leftovers[row]

    def leave(self, rows: Mapping[RowId, Collection[int]]) -> None:
        """Discount rows that left the queue, given with the units that store them, and have the units drop them."""
        self._cells.drop(rows)
        by_units: dict[tuple[int, ...], list[RowId]] = {}
        for row, units in rows.items():
            by_units.setdefault(tuple(units), []).append(row)
        for together, leaving in by_units.items():
            self._discount(leaving, together)
            if self._holds:
                self._held_back.append((self._last_hold, together, leaving))
            else:
                self._units.settle(together, rows=leaving)
        for row in self._leftovers.keys() & rows.keys() if self._leftovers else ():
            self._units.settle(self._leftovers.pop(row), rows=[row])

    def withdraw(self, rows: Sequence[RowId], units: Collection[int]) -> None:
        """Discount the rows of a snapshot that was not restored; it may be tried again, with the same ids."""
        self._discount(rows, units)
        self._units.settle(units, parts=[PartId(*row, 0) for row in rows])

    def size(self, row: RowId) -> int:
        """The bytes of a row."""
        return self._sizes[row]

    @property
    def is_held(self) -> bool:
        """Whether a client reads a snapshot, for which units keep rows that leave."""
        return bool(self._holds)

    def hold(self, client: str) -> int:
        """Have units keep rows that leave from now on, for a client that reads a snapshot. Return the hold's number."""
        self._last_hold += 1
        self._holds[self._last_hold] = client
        return self._last_hold

    def release(self, hold: int) -> None:
        """Release a hold, whose snapshot has been read; harmless where it was released before."""
        self._holds.pop(hold, None)
        oldest = min(self._holds, default=self._last_hold + 1)
        while self._held_back and self._held_back[0][0] < oldest:
            _, units, rows = self._held_back.popleft()
            self._units.settle(units, rows=rows)

    def lose_client(self, client: str) -> None:
        """Release the holds of a client that is gone."""
        for hold in [hold for hold, holder in self._holds.items() if holder == client]:
            self.release(hold)

    def _discount(self, rows: Sequence[RowId], units: Collection[int]) -> None:
        total = sum(self._sizes.pop(row) for row in rows)
        self.nbytes -= total
        for number in units:
            self._count(number, -len(rows), -total)

    def _count(self, number: int, rows: int, nbytes: int) -> None:
        unit = self._units.get(number)
        if unit is not None:
            unit.rows += rows
            unit.bytes += nbytes


def _listed(message: Parts) -> set[PartId]:
    return {PartId(*part) for part in unpack(message.parts, 3).tolist()}
