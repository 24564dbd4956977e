"""Those who wait at a controller, first come, first served.

The head alone tries, so a big request is never overtaken for ever by small ones; one that stands aside, since it waits
for something that nobody else does, lets the others pass. Nobody waits longer than it asked to.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from tailrace.errors import QueueError, TailraceError
from tailrace.transfer.queue.controller.timers import Timer, Timers
from tailrace.transfer.queue.messages import Answer
from tailrace.transfer.wire.messages import Failure
from tailrace.transfer.wire.server import Server, Ticket


class Wait(Enum):
    """What an attempt returns instead of an answer."""

    HERE = "here"
    """It has to wait on, and so have those behind it."""
    ASIDE = "aside"
    """It has to wait on, the others have not."""
    OVER = "over"
    """It got what it waited for, and will be answered when that is done."""


@dataclass(slots=True, eq=False)
class Waiter:
    """A request that is not answered yet."""

    ticket: Ticket
    since: float
    attempt: Callable[[], Answer | Wait]
    """A QueueError is the answer, too."""
    reason: Callable[[], str]
    """What it waits for."""
    waited: Callable[[float], None]
    """Told the seconds when it is answered."""
    timer: Timer


class Line:
    """Waiters for one thing."""

    def __init__(self, server: Server, timers: Timers, changed: Callable[[], None]) -> None:
        """`changed`: called when the head has given up, and the next one may get what it could not."""
        self._changed = changed
        self._server = server
        self._timers = timers
        self._waiters: deque[Waiter] = deque()
        self.blocked = False
        """Whether somebody waits behind whom all have to."""

    def __len__(self) -> int:
        return len(self._waiters)

    def join(
        self,
        ticket: Ticket,
        wait_s: float,
        attempt: Callable[[], Answer | Wait],
        *,
        late: Callable[[float], QueueError],
        reason: Callable[[], str],
        waited: Callable[[float], None],
    ) -> None:
        """Wait up to `wait_s` seconds, `serve` being called now and whenever something changes.

        `late` makes the error that ends it when the time is over.
        """
        now = self._server.now
        asked = float(f"{wait_s:.3g}")  # a client names what is left of its limit when the message leaves
        timer = self._timers.at(now + wait_s, lambda: self._give_up(waiter, late(asked)))
        waiter = Waiter(ticket, now, attempt, reason, waited, timer)
        self._waiters.append(waiter)

    @property
    def reason(self) -> str:
        """What the first waits for."""
        return self._waiters[0].reason()

    def serve(self) -> bool:
        """Something may have changed for the head; whether somebody got what he waited for."""
        served, aside, self.blocked = False, 0, False
        while not self.blocked and aside < len(self._waiters):
            waiter = self._waiters[aside]
            try:
                answer = waiter.attempt()
            except QueueError as error:
                self._fail(waiter, error)
                continue
            match answer:
                case Wait.HERE:
                    self.blocked = True
                case Wait.ASIDE:
                    aside += 1
                case Wait.OVER:
                    self._leave(waiter)
                    served = True
                case _:
                    self._leave(waiter)
                    self._server.reply(waiter.ticket, answer)
                    served = True
        return served

    def send_away(self, error: Callable[[], TailraceError]) -> None:
        """Nobody gets anything any more."""
        for waiter in list(self._waiters):
            self._fail(waiter, error())

    def forget(self, gone: Callable[[Ticket], bool]) -> bool:
        """Tickets that nobody waits for any more; whether there were such."""
        leaving = [waiter for waiter in self._waiters if gone(waiter.ticket)]
        for waiter in leaving:
            self._leave(waiter)
        return bool(leaving)

    def _leave(self, waiter: Waiter) -> None:
        waiter.timer.cancel()
        self._waiters.remove(waiter)
        waiter.waited(self._server.now - waiter.since)

    def _fail(self, waiter: Waiter, error: TailraceError) -> None:
        self._leave(waiter)
        self._server.reply(waiter.ticket, Failure.of(error))

    def _give_up(self, waiter: Waiter, error: TailraceError) -> None:
        self._fail(waiter, error)
        self._changed()
