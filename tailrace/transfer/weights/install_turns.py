"""Turns to install a version, so that all engines but one generate (AsyncFlow, figure 8 d).

    receiver ──TakeTurn──▶ queue ──first──▶ Accepted    has it until EndTurn, or until it is gone; then the next has it

Who waits on whom: a receiver on those that asked before it, as long as they give signs of life. A name stands for one
request, whatever connection it comes by, so a receiver that connects again keeps its place.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tailrace.transfer.wire.server import Ticket


@dataclass(slots=True)
class _TurnRequest:
    client: str
    ticket: Ticket | None
    """None once it was answered."""


class InstallTurns:
    """Used in the sender's thread."""

    def __init__(self, answer: Callable[[Ticket], object]) -> None:
        """`answer` tells who waits that it has the turn, or need not wait any more."""
        self._answer = answer
        self._requests: dict[str, _TurnRequest] = {}
        """In the order of asking; the first has the turn."""

    def request(self, name: str, ticket: Ticket) -> None:
        """Answer `ticket` when `name` has the turn."""
        self._requests[name] = _TurnRequest(ticket.client, ticket)
        self._grant_next()

    def end(self, name: str) -> None:
        """`name` gives the turn back, or does not want it any more. Harmless twice."""
        request = self._requests.pop(name, None)
        if request is not None and request.ticket is not None:
            self._answer(request.ticket)
        self._grant_next()

    def forget_client(self, client: str) -> None:
        """A receiver is gone."""
        self._requests = {name: request for name, request in self._requests.items() if request.client != client}
        self._grant_next()

    def _grant_next(self) -> None:
        request = next(iter(self._requests.values()), None)
        if request is not None and request.ticket is not None:
            ticket, request.ticket = request.ticket, None
            self._answer(ticket)
