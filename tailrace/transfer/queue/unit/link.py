"""A unit's messages to the controller: signs of life, and the rows that were written.

    every second   Join ─────▶ controller     ◀── Joined: the unit's number, the queue's columns
    after a put    Written ──▶ controller     ◀── Accepted, or StaleRowError: the rows are no longer wanted
                                                   without an answer it is sent again after the next Joined

Waiting: nothing waits here. A controller that does not answer is restarting. Each Join is a new message, so the first
one that reaches the new controller connects the two again. Then every Written without an answer is sent again. A
controller that refuses the unit ends it: see `join`. A controller that hears of another incarnation asks the unit which
parts it has.
"""

import secrets
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import msgspec

from tailrace.errors import PeerLost, QueueClosed, TailraceError, WireError
from tailrace.transfer.queue.messages import CONTROLLER, Join, Joined, Written
from tailrace.transfer.wire.calls import Call
from tailrace.transfer.wire.frames import Reply
from tailrace.transfer.wire.messages import Failure, Message
from tailrace.transfer.wire.server import Server

Told: TypeAlias = Callable[[Message], None]
"""A function that gets the controller's answer to Written."""


class ControllerLink:
    """A unit's connection to the controller, driven by the unit's server."""

    def __init__(self, server: Server, controller: str, join: Join, then: Callable[[Joined], None]) -> None:
        """`controller`: its endpoint. `then`: called with each Joined.

        Raises:
            WireError: `controller` is not an endpoint.
        """
        self.heard = server.now
        """The time of the controller's last answer, or of the start."""
        self._server = server
        self._controller = controller
        self._link = server.link(controller, peer=CONTROLLER)
        self._join = join
        self._then = then
        self._unit: int | None = None
        self._untold: list[tuple[bytes, Told]] = []
        """Packed rows that the controller does not know of yet, each with the function that gets its answer."""
        self._refused: TailraceError | None = None

    def join(self) -> None:
        """Send a sign of life.

        Raises:
            TailraceError: the controller refused an earlier one, or has another token.
        """
        if self._refused is not None:
            raise self._refused
        self._link.start(Call(self._controller, self._join), self._on_joined)

    def leave(self) -> None:
        """Tell the controller from now on that this unit is to leave: its rows go to others."""
        if not self._join.leaving:
            self._join = msgspec.structs.replace(self._join, leaving=True)
            self.join()

    def begin_anew(self) -> None:
        """Join as a unit would that was restarted with its storage, since this one has lost parts."""
        self._join = msgspec.structs.replace(self._join, incarnation=secrets.token_hex(8), lasting=True)
        self.join()

    def tell(self, rows: bytes, told: Told) -> None:
        """Tell the controller that rows, packed as [n, 2], were written. `told` is called with its answer."""
        if self._unit is None:
            self._untold.append((rows, told))
        else:
            self._link.start(Call(self._controller, Written(self._unit, rows)), partial(self._on_told, rows, told))

    def _on_joined(self, result: Reply | TailraceError) -> None:
        match result:
            case Reply(Joined() as joined):
                self._unit = joined.unit
                self.heard = self._server.now
                if joined.leaving:
                    self.leave()
                untold, self._untold = self._untold, []
                for rows, told in untold:
                    self.tell(rows, told)
                self._then(joined)
            case PeerLost() | QueueClosed():
                pass  # the next Join, if there is one, tries again
            case TailraceError():
                self._refused = result
            case Reply(answer):
                self._refused = WireError(f"the controller answered Join with {type(answer).__name__}, not Joined")

    def _on_told(self, rows: bytes, told: Told, result: Reply | TailraceError) -> None:
        match result:
            case Reply(answer):
                told(answer)
            case PeerLost() | QueueClosed():
                self._untold.append((rows, told))
            case TailraceError():
                told(Failure.of(result))
