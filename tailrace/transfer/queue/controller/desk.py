"""What the parts of a controller share: its clock, its state, and how they wake each other."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import numpy as np

from tailrace.config.transfer import ServiceQueueConfig
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.cells import PartCodec
from tailrace.transfer.queue.controller.journal import Change
from tailrace.transfer.queue.controller.lines import Line
from tailrace.transfer.queue.controller.small import SmallCells
from tailrace.transfer.queue.controller.stock import Stock
from tailrace.transfer.queue.controller.timers import Timers
from tailrace.transfer.queue.controller.units import KnownUnit, Units
from tailrace.transfer.queue.messages import Describe, Run, pack
from tailrace.transfer.queue.rows.control_plane import ControlPlane
from tailrace.transfer.queue.storage.base import PartId
from tailrace.transfer.wire.server import Server


@dataclass(slots=True, eq=False)
class Desk:
    """The state of a controller."""

    server: Server
    config: ServiceQueueConfig
    codec: PartCodec
    control: ControlPlane
    units: Units
    stock: Stock
    small: SmallCells
    timers: Timers
    note: Callable[[Change], None]
    """Write a decision into the journal, before anybody hears of it."""
    rows_ready: Callable[[], None]
    """Rows may have become ready."""
    room_made: Callable[[], None]
    """Rows may have left."""
    closed: bool = False

    def line(self, changed: Callable[[], None]) -> Line:
        """A new line of those who wait; see `Line`."""
        return Line(self.server, self.timers, changed)

    def describe(self, numbers: Collection[int], rows: Collection[RowId]) -> None:
        """Parts of these rows count (from now on): units that have found them in their storage learn what they hold."""
        for unit in filter(None, map(self.units.get, numbers)):
            if unit.unknown:
                self._describe(unit, rows)

    def _describe(self, unit: KnownUnit, rows: Collection[RowId]) -> None:
        found = []
        for row in filter(self.control.is_stored, rows):
            lengths = self.control.facts(row).lengths
            for tag, columns in self.control.parts(row).items():
                part = PartId(*row, tag)
                if part in unit.unknown:
                    unit.unknown.remove(part)
                    found.append((part, Run(1, columns, _packed([lengths[column] for column in columns]))))
        if found:
            parts, runs = zip(*found, strict=True)
            tags, ids = _packed([part.tag for part in parts]), pack([RowId(*part[:2]) for part in parts])
            self.units.insist(unit.number, Describe(tags, ids, list(runs)))

    def dismiss(self, number: int, parts: Iterable[PartId]) -> None:
        """A unit has parts of rows that are not in the queue.

        Of rows that have left it takes no others. Those that were never in, such as of a snapshot whose restoring broke
        off, may come yet.
        """
        left, others = set(), []
        for part in parts:
            row = RowId(*part[:2])
            if self.control.has_left(row):
                left.add(row)
            else:
                others.append(part)
        self.units.settle([number], parts=others, rows=left)

    @property
    def recovering(self) -> bool:
        """Whether nobody is served yet, because units from before may still come."""
        return self.units.recovering


def _packed(numbers: list[int]) -> bytes:
    return pack(np.array(numbers, dtype=np.int64))
