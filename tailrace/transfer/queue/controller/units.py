"""The storage units of a queue, as its controller sees them.

    Join ──▶ new: link to it, ask for its Inventory ──Parts──▶ ready ──silent for a while──▶ dead
    Join of one that is known: a sign of life

Who waits on whom: nobody on a unit. What it need not store any more is collected while messages are at hand, and sent
then; what it does not hear of because it is gone, the inventory puts right when it comes back.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from tailrace.errors import QueueClosed, TailraceError, WireError
from tailrace.transfer.queue.base import RowId, UnitStats
from tailrace.transfer.queue.controller.timers import Timer, Timers
from tailrace.transfer.queue.messages import STORAGE_UNIT, Inventory, Join, Parts, Settle, Unit, Write, pack, unpack
from tailrace.transfer.queue.storage.base import PartId
from tailrace.transfer.wire.calls import Call, expect
from tailrace.transfer.wire.connection import Connection, Then
from tailrace.transfer.wire.frames import Buffer, Reply
from tailrace.transfer.wire.messages import Message
from tailrace.transfer.wire.server import Server
from tailrace.transfer.wire.sockets import reachable

_SETTLE_AT_ONCE = 4096
"""Rows and parts that are not collected for longer."""


@dataclass(slots=True, eq=False)
class KnownUnit:
    """A unit that has joined, or that is expected to join again."""

    number: int
    name: str
    join: Join | None = None
    link: Connection | None = None
    endpoint: str = ""
    expected: bool = False
    """Whether it is from before the controller was started anew, and has not come back."""
    ready: bool = False
    """Whether it has said what it has: rows may be written to it and read from it."""
    rows: int = 0
    bytes: int = 0
    """Of the rows that it has, as far as the controller knows."""
    deadline: Timer | None = None
    settle: Timer | None = None
    lost_parts: list[PartId] = field(default_factory=list)
    left_rows: list[RowId] = field(default_factory=list)

    @property
    def room(self) -> int:
        """Bytes that it can still take."""
        return 0 if self.join is None else self.join.max_bytes - self.bytes


class Units:
    """All units by number."""

    def __init__(
        self,
        server: Server,
        timers: Timers,
        *,
        limit_s: float,
        named: Callable[[KnownUnit], None],
        asked: Callable[[KnownUnit], Callable[[set[PartId]], None]],
        died: Callable[[KnownUnit], None],
    ) -> None:
        """`named`: a unit got its number. `asked`: a unit is asked what it has; what is returned gets the answer.

        `died`: a unit was silent for `limit_s` seconds, or was started anew without what it had.
        """
        self._server = server
        self._timers = timers
        self._limit_s = limit_s
        self._named = named
        self._asked = asked
        self._died = died
        self._units: dict[int, KnownUnit] = {}
        self._names: dict[str, KnownUnit] = {}
        self.next_number = 0
        """Of the next unit: another one than of any that has died, which clients may still take for it."""

    def get(self, number: int) -> KnownUnit | None:
        """The unit with this number, if there is one."""
        return self._units.get(number)

    @property
    def ready(self) -> list[KnownUnit]:
        """Those that rows may be written to."""
        return [unit for unit in self._units.values() if unit.ready]

    @property
    def largest(self) -> int:
        """Bytes that the largest of those that have joined holds."""
        return max((unit.join.max_bytes for unit in self._units.values() if unit.join), default=0)

    @property
    def recovering(self) -> bool:
        """Whether a unit that has rows has not come back yet, and may still do so."""
        return any(unit.rows and unit.expected for unit in self._units.values())

    def expect(self, number: int, name: str) -> None:
        """A unit from before the controller was started: it counts as dead where it does not join in time."""
        unit = self._add(number, name)
        unit.expected = True
        self._watch(unit)

    def join(self, message: Join) -> KnownUnit:
        """A unit says that it is there.

        Raises:
            WireError: it cannot be reached from here.
        """
        unit = self._names.get(message.name)
        if unit is not None and unit.join is not None and unit.join.incarnation != message.incarnation:
            self._retire(unit, lasting=message.lasting)
            unit = self._names.get(message.name)
        if unit is None:
            unit = self._add(self.next_number, message.name)
            self._named(unit)
        if not unit.expected:  # one that comes back and never says what it has is not waited for any longer
            self._watch(unit)
        if unit.link is None:
            self._connect(unit, message)
        return unit

    def choose(
        self, nbytes: int, replicas: int, *, preferred: Collection[int] = (), full: Collection[int] = ()
    ) -> list[KnownUnit]:
        """Units for rows of `nbytes`: those with the least; none where no unit has room.

        `preferred` ones are chosen also where they have up to `nbytes` more than others, `full` ones after all others:
        a unit may have less room than the controller knows of, such as where its machine has.
        """

        def taken(unit: KnownUnit) -> tuple[bool, int, bool]:
            is_preferred = unit.number in preferred
            return unit.number in full, unit.bytes - nbytes * is_preferred, not is_preferred

        fit = sorted((unit for unit in self.ready if unit.room >= nbytes), key=taken)
        wanted = min(replicas, len(self.ready))
        return fit[:wanted] if len(fit) >= wanted else []

    def write(self, number: int, message: Write, frames: Sequence[Buffer], then: Then) -> None:
        """Have a unit that is ready store parts; `then` gets the outcome."""
        unit = self._units[number]
        assert unit.link is not None, "units that are ready are linked to"
        unit.link.start(Call(unit.endpoint, message, frames), then)

    def insist(self, number: int, message: Message) -> None:
        """Tell a unit what it has to have heard: where that fails, its next Join begins with an inventory."""
        unit = self._units.get(number)
        if unit is None or unit.link is None:
            return
        link = unit.link

        def then(result: Reply | TailraceError) -> None:
            if isinstance(result, TailraceError) and not isinstance(result, QueueClosed) and unit.link is link:
                self._disconnect(unit)

        link.start(Call(unit.endpoint, message), then)

    def settle(self, numbers: Iterable[int], *, parts: Collection[PartId] = (), rows: Collection[RowId] = ()) -> None:
        """Parts that lost, or rows that left, are not to be stored any more by these units."""
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

    def listing(self) -> list[Unit]:
        """The units for clients: all that have joined and are not dead, even before they have said what they have."""
        return [
            Unit(unit.number, unit.join.endpoints, unit.join.host, unit.join.directory)
            for unit in self._units.values()
            if unit.join is not None
        ]

    def stats(self) -> tuple[UnitStats, ...]:
        """Of each unit that is there or may come back."""
        return tuple(
            UnitStats(
                number=unit.number,
                name=unit.name,
                alive=unit.ready,
                rows=unit.rows,
                bytes=unit.bytes,
                max_bytes=0 if unit.join is None else unit.join.max_bytes,
            )
            for unit in self._units.values()
        )

    def _add(self, number: int, name: str) -> KnownUnit:
        unit = self._units[number] = self._names[name] = KnownUnit(number, name)
        self.next_number = max(self.next_number, number + 1)
        return unit

    def _watch(self, unit: KnownUnit) -> None:
        if unit.deadline is not None:
            unit.deadline.cancel()
        unit.deadline = self._timers.at(self._server.now + self._limit_s, lambda: self._die(unit))

    def _connect(self, unit: KnownUnit, message: Join) -> None:
        ways = reachable(message.endpoints, message.host)
        if not ways:
            raise WireError(f"unit {message.name!r} listens at {message.endpoints} alone: not reached from here")
        unit.join = message
        unit.endpoint = ways[0]
        unit.link = link = self._server.link(unit.endpoint, peer=STORAGE_UNIT)
        take = self._asked(unit)

        def then(result: Reply | TailraceError) -> None:
            if unit.link is not link:
                return  # it died meanwhile, or was started anew
            try:
                if isinstance(result, TailraceError):
                    raise result
                listed = _listed(expect(result, Parts))
            except QueueClosed:
                return  # this server stops, and hangs up by itself
            except TailraceError:
                self._disconnect(unit)  # its next Join begins anew
            else:
                unit.ready, unit.expected = True, False
                self._watch(unit)
                take(listed)

        link.start(Call(unit.endpoint, Inventory()), then)

    def _retire(self, unit: KnownUnit, *, lasting: bool) -> None:
        """The unit of this name was started anew."""
        if lasting:
            self._disconnect(unit)
        else:
            self._die(unit)

    def _die(self, unit: KnownUnit) -> None:
        if unit.deadline is not None:
            unit.deadline.cancel()
            unit.deadline = None
        self._disconnect(unit)
        unit.expected = False
        unit.rows = unit.bytes = 0
        del self._units[unit.number], self._names[unit.name]  # one that comes back is another unit, with no rows
        self._died(unit)

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


def _listed(message: Parts) -> set[PartId]:
    return {PartId(*part) for part in unpack(message.parts, 3).tolist()}
