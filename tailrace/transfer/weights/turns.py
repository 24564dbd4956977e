"""Turns to install a version, so that all engines but one generate (AsyncFlow, figure 8 d).

    receiver ──TakeTurn──▶ line ──first──▶ Accepted    has it until EndTurn, or until it is gone; then the next has it

Who waits on whom: a receiver on those that asked before it, as long as they give signs of life. A name stands for one
wish, whatever connection it comes by, so a receiver that connects again keeps its place.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tailrace.transfer.wire.server import Ticket


@dataclass(slots=True)
class _Wish:
    client: str
    ticket: Ticket | None
    """None once it was answered."""


class TurnLine:
    """Used in the sender's thread."""

    def __init__(self, answer: Callable[[Ticket], object]) -> None:
        """`answer` tells who waits that it has the turn, or that it need not wait any more."""
        self._answer = answer
        self._wishes: dict[str, _Wish] = {}
        """In the order of asking; the first has the turn."""

    def ask(self, name: str, ticket: Ticket) -> None:
        """Answer `ticket` when `name` has the turn."""
        self._wishes[name] = _Wish(ticket.client, ticket)
        self._look()

    def end(self, name: str) -> None:
        """`name` gives the turn back, or does not want it any more. Harmless twice."""
        wish = self._wishes.pop(name, None)
        if wish is not None and wish.ticket is not None:
            self._answer(wish.ticket)
        self._look()

    def leave(self, client: str) -> None:
        """A receiver is gone."""
        self._wishes = {name: wish for name, wish in self._wishes.items() if wish.client != client}
        self._look()

    def _look(self) -> None:
        wish = next(iter(self._wishes.values()), None)
        if wish is not None and wish.ticket is not None:
            ticket, wish.ticket = wish.ticket, None
            self._answer(ticket)
