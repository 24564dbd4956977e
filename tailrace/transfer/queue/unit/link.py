"""What a unit says to the controller: that it lives, and which rows have come.

    every second   Join ─────▶ controller     ◀── Joined: the unit's number, the queue's columns
    after a put    Written ──▶ controller     ◀── Accepted, or StaleRowError: the rows are not wanted any more
                                                   without an answer it is said again with the next Joined

Who waits on whom: nobody. A controller that does not answer is one that is being started anew; each Join is a new
message, so the first one that arrives there makes the two known to each other again, and all that had no answer is
sent again. A controller that refuses the unit ends it: see `join`. One that hears of another incarnation asks the unit
what it has.
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
"""Gets the controller's answer to Written."""


class ControllerLink:
    """A unit's connection to the controller, driven by the unit's server."""

    def __init__(self, server: Server, controller: str, join: Join, then: Callable[[Joined], None]) -> None:
        """`controller`: its endpoint. `then`: called with each Joined.

        Raises:
            WireError: that is no endpoint.
        """
        self._controller = controller
        self._link = server.link(controller, peer=CONTROLLER)
        self._join = join
        self._then = then
        self._unit: int | None = None
        self._untold: list[tuple[bytes, Told]] = []
        """Packed rows that the controller has still to hear of, and who waits for that."""
        self._refused: TailraceError | None = None

    def join(self) -> None:
        """Give a sign of life.

        Raises:
            TailraceError: the controller refused an earlier one, or does not know the queue's token.
        """
        if self._refused is not None:
            raise self._refused
        self._link.start(Call(self._controller, self._join), self._on_joined)

    def begin_anew(self) -> None:
        """This unit lacks parts that it had: it joins as one that was started anew."""
        self._join = msgspec.structs.replace(self._join, incarnation=secrets.token_hex(8))
        self.join()

    def tell(self, rows: bytes, told: Told) -> None:
        """The rows, packed as [n, 2], have come. `told` is called with what the controller makes of it."""
        if self._unit is None:
            self._untold.append((rows, told))
        else:
            self._link.start(Call(self._controller, Written(self._unit, rows)), partial(self._on_told, rows, told))

    def _on_joined(self, result: Reply | TailraceError) -> None:
        match result:
            case Reply(Joined() as joined):
                self._unit = joined.unit
                untold, self._untold = self._untold, []
                for rows, told in untold:
                    self.tell(rows, told)
                self._then(joined)
            case PeerLost() | QueueClosed():
                pass  # the next Join says it again, if there is one
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
