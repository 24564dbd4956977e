"""What the parts of a controller share: its clock, its state, and how they wake each other."""

from collections.abc import Callable
from dataclasses import dataclass

from tailrace.config.transfer import ServiceQueueConfig
from tailrace.transfer.queue.cells import PartCodec
from tailrace.transfer.queue.control_plane import ControlPlane
from tailrace.transfer.queue.controller.journal import Change
from tailrace.transfer.queue.controller.lines import Line
from tailrace.transfer.queue.controller.stock import Stock
from tailrace.transfer.queue.controller.timers import Timers
from tailrace.transfer.queue.controller.units import Units
from tailrace.transfer.queue.wire.server import Server


@dataclass(slots=True, eq=False)
class Desk:
    """The state of a controller."""

    server: Server
    config: ServiceQueueConfig
    codec: PartCodec
    control: ControlPlane
    units: Units
    stock: Stock
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

    @property
    def recovering(self) -> bool:
        """Whether nobody is served yet, because units from before may still come."""
        return self.units.recovering
