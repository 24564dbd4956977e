"""What the parts of a controller share: its clock, its state, and how they wake each other."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tailrace.config.transfer import ServiceQueueConfig
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.cells import PartCodec
from tailrace.transfer.queue.controller.journal import Change
from tailrace.transfer.queue.controller.lines import Line
from tailrace.transfer.queue.controller.small import SmallCells
from tailrace.transfer.queue.controller.stock import Stock
from tailrace.transfer.queue.controller.timers import Timers
from tailrace.transfer.queue.controller.units import Units
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
