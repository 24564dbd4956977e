"""Copies of rows from unit to unit: until each row is on `queue.replicas` units that stay.

    a unit died or leaves, or rows were put while units were missing ──▶ rows that lack copies
      └─Copy──▶ a unit that has them ──Write──▶ another unit ──▶ Accepted: the journal has it, the rows are on both

A row is not copied while a task writes outputs to it: that task's client writes to the units that the row had when it
was claimed. Such a row waits until its leases have ended. A row that was claimed or written to while it was copied is
copied again; what the unit has of it already is not written twice.

Waiting: no request waits for a copy. One Copy is on its way at a time, of a few MiB, so units answer clients in
between. After a failure, and while no unit has room, the next attempt follows in a second.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np

from tailrace.errors import QueueClosed, StorageFull, TailraceError
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.controller import journal as log
from tailrace.transfer.queue.controller.journal import Journal
from tailrace.transfer.queue.controller.units import KnownUnit, UnitAccounts, Units
from tailrace.transfer.queue.controller.waiting import Timer, Timers
from tailrace.transfer.queue.messages import Copy, pack
from tailrace.transfer.queue.rows.control_plane import ControlPlane
from tailrace.transfer.wire.connection import Connection
from tailrace.transfer.wire.frames import Reply
from tailrace.transfer.wire.messages import Accepted
from tailrace.transfer.wire.server import Server

_COPY_BYTES = 4 * 2**20
"""The bytes of one Copy, unless a single row has more."""
_LOOK_ROWS = 1024
"""The rows among which those of one Copy are sought."""
_PAUSE_S = 1.0
"""Seconds until the next attempt."""


@dataclass(frozen=True, slots=True, eq=False)
class _Copying:
    """A Copy that is on its way."""

    source: KnownUnit
    target: KnownUnit
    link: Connection | None
    """The target's connection: with another one, the target may have lost parts meanwhile."""
    tags: dict[RowId, frozenset[int]]
    """The tags of the parts that are copied, by row."""


class Copies:
    """Copies rows that are on too few units."""

    def __init__(
        self,
        server: Server,
        timers: Timers,
        *,
        journal: Journal,
        control: ControlPlane,
        units: Units,
        accounts: UnitAccounts,
        replicas: int,
    ) -> None:
        """`replicas`: the number of units that each row should be on."""
        self._server = server
        self._timers = timers
        self._journal = journal
        self._control = control
        self._units = units
        self._accounts = accounts
        self._replicas = replicas
        self._waiting: dict[RowId, None] = {}
        """Rows that may lack copies, in the order in which they are copied."""
        self._written_to: set[RowId] = set()
        """Rows that lack copies and that a task writes outputs to."""
        self._copying: _Copying | None = None
        self._pause: Timer | None = None

    @property
    def lacking(self) -> int:
        """The number of rows that are on too few units."""
        copying = self._copying.tags if self._copying is not None else ()
        return sum(map(self._lacks_copies, {*self._waiting, *self._written_to, *copying}))

    def look(self) -> None:
        """Find all rows that lack copies: a unit has come, has died, or is to leave."""
        if self._copying is not None and not self._copying.target.ready:
            self._copying = None
        copying = self._copying.tags if self._copying is not None else ()
        lacking = self._control.rows_on(self._is_too_few)
        self._waiting = dict.fromkeys(row for row in lacking if row not in copying)
        self._written_to.clear()
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        self._go_on()

    def note(self, rows: Iterable[RowId]) -> None:
        """Note rows that may lack copies: they were put, or a unit missed their outputs."""
        self._waiting.update(dict.fromkeys(rows))
        self._go_on()

    def note_new(self, rows: Iterable[RowId], units: Collection[int]) -> None:
        """Note new rows that `units` have, where these are too few."""
        if self._is_too_few(units):
            self.note(rows)

    def lease_ended(self, rows: Iterable[RowId]) -> None:
        """Note that a task no longer writes outputs to these rows."""
        if self._written_to:
            freed = self._written_to.intersection(rows)
            self._written_to -= freed
            self.note(freed)

    def is_needed(self, unit: KnownUnit) -> bool:
        """Whether a unit that is to leave still has rows that others lack, or no other unit would be left."""
        staying = len(self._units.staying)
        enough = min(self._replicas, staying)
        return not staying or bool(
            self._control.rows_on(lambda units: unit.number in units and self._staying(units) < enough)
        )

    def _staying(self, units: Collection[int]) -> int:
        leaving = self._units.leaving
        return sum(unit not in leaving for unit in units) if leaving else len(units)

    def _is_too_few(self, units: Collection[int]) -> bool:
        return self._staying(units) < self._replicas

    def _lacks_copies(self, row: RowId) -> bool:
        return self._control.is_stored(row) and self._is_too_few(self._control.units(row))

    def _go_on(self) -> None:
        """Start the next Copy, if none is on its way and there is no pause."""
        if self._copying is not None or self._pause is not None or not self._waiting:
            return
        copying = self._gather()
        if copying is None:
            self._rest()
            return
        self._copying = copying
        parts = np.array([(*row, tag) for row, tags in copying.tags.items() for tag in tags], np.int64)
        for row in copying.tags:
            self._accounts.leave_over(row, copying.target.number)
        message = Copy(pack(parts), self._units.described(copying.target))
        self._units.ask(copying.source.number, message, partial(self._on_copied, copying))

    def _gather(self) -> _Copying | None:
        """Choose rows that one unit can copy to another. Rows of which no unit can be copied now go to the end."""
        source = target = None
        tags: dict[RowId, frozenset[int]] = {}
        nbytes = 0
        for row in list(islice(self._waiting, _LOOK_ROWS)):
            del self._waiting[row]
            if not self._lacks_copies(row):
                continue
            if self._control.is_written_to(row):
                self._written_to.add(row)
                continue
            units, size = self._control.units(row), self._accounts.size(row)
            if source is None or target is None:
                source, target = self._way(units, size)
            fits = not tags or nbytes + size <= _COPY_BYTES
            if source is None or target is None or source.number not in units or target.number in units or not fits:
                self._waiting[row] = None
                continue
            tags[row] = frozenset(self._control.parts(row))
            nbytes += size
        if source is None or target is None or not tags:
            return None
        return _Copying(source, target, target.link, tags)

    def _way(self, units: Sequence[int], nbytes: int) -> tuple[KnownUnit | None, KnownUnit | None]:
        """A unit that has a row of `nbytes`, and one that can take it; None where there is none."""
        ready = (unit for unit in map(self._units.get, units) if unit is not None and unit.ready)
        return next(ready, None), next(iter(self._units.choose(nbytes, 1, apart=units, staying=True)), None)

    def _on_copied(self, copying: _Copying, result: Reply | TailraceError) -> None:
        if self._copying is not copying:
            return  # its target has died
        self._copying = None
        if isinstance(result, QueueClosed):
            return  # the connection to the source was closed; `look` follows when the source has died, or is back
        target = copying.target
        if isinstance(result, StorageFull):
            self._units.note_full(target.number)
        done = isinstance(result, Reply) and isinstance(result.answer, Accepted)
        if done and target.ready and target.link is copying.link:
            rows = [row for row, tags in copying.tags.items() if self._is_whole(row, tags)]
            if rows:
                self._journal.append(log.RowsCopied(target.number, pack(rows)))
                self._control.copied(target.number, rows)
                self._accounts.copied(rows, target.number)
        self._waiting.update(dict.fromkeys(filter(self._lacks_copies, copying.tags)))
        if done:
            self._go_on()
        else:
            self._rest()

    def _is_whole(self, row: RowId, tags: frozenset[int]) -> bool:
        """Whether the parts that were copied are all of a row's, and no others are on their way."""
        control = self._control
        return control.is_stored(row) and not control.is_written_to(row) and control.parts(row).keys() == tags

    def _rest(self) -> None:
        if self._waiting and self._pause is None:
            self._pause = self._timers.at(self._server.now + _PAUSE_S, self._end_pause)

    def _end_pause(self) -> None:
        self._pause = None
        self._go_on()
