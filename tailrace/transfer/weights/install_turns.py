"""Turns to install a version: one engine installs while all others generate (AsyncFlow, figure 8 d).

    receiver ──TakeTurn──▶ queue ──first──▶ Accepted    the turn lasts until EndTurn, or until the receiver is gone

Waiting: a receiver waits for those that asked before it, as long as they give signs of life. A name stands for one
request on any connection, so a receiver that connects again keeps its place.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tailrace.transfer.wire.server import Ticket


@dataclass(slots=True)
class _TurnRequest:
    client: str
    ticket: Ticket | None
    """None after the answer."""


class InstallTurns:
    """The queue of requests for a turn. Used in the sender's thread."""

    def __init__(self, answer: Callable[[Ticket], object]) -> None:
        """`answer` tells a waiting receiver that it has the turn, or that it need not wait any longer."""
        self._answer = answer
        self._requests: dict[str, _TurnRequest] = {}
        """The requests in the order of asking; the first has the turn."""

    def request(self, name: str, ticket: Ticket) -> None:
        """Queue the request `name`, and answer `ticket` when it has the turn."""
        self._requests[name] = _TurnRequest(ticket.client, ticket)
        self._grant_next()

    def end(self, name: str) -> None:
        """Give the turn of `name` back, or withdraw its request. Calling it twice is harmless."""
        request = self._requests.pop(name, None)
        if request is not None and request.ticket is not None:
            self._answer(request.ticket)
        self._grant_next()

    def forget_client(self, client: str) -> None:
        """Withdraw the requests of a receiver that is gone."""
        self._requests = {name: request for name, request in self._requests.items() if request.client != client}
        self._grant_next()

    def _grant_next(self) -> None:
        request = next(iter(self._requests.values()), None)
        if request is not None and request.ticket is not None:
            ticket, request.ticket = request.ticket, None
            self._answer(ticket)
