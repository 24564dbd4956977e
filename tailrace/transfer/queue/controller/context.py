"""The state that the parts of a controller share."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailrace.transfer.queue.cells import PartCodec
from tailrace.transfer.queue.controller.copies import Copies
from tailrace.transfer.queue.controller.inline_cells import InlineCells
from tailrace.transfer.queue.controller.journal import Journal
from tailrace.transfer.queue.controller.units import UnitAccounts, Units
from tailrace.transfer.queue.controller.waiting import Timers
from tailrace.transfer.queue.rows.control_plane import ControlPlane
from tailrace.transfer.wire.server import Server

if TYPE_CHECKING:
    from tailrace.config.transfer import ServiceQueueConfig


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """The state of a controller, and the server through which it answers."""

    server: Server
    timers: Timers
    config: "ServiceQueueConfig"
    codec: PartCodec
    journal: Journal
    """Every decision is written here before anybody hears of it."""
    control: ControlPlane
    units: Units
    accounts: UnitAccounts
    copies: Copies
    cells: InlineCells
