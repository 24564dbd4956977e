"""Lines of requests that wait at a controller, and timers.

A line is first come, first served: only its head tries, so small requests never overtake a big one for ever. A request
that waits for something that no other one waits for steps aside and lets the others pass. No request waits longer than
it asked to.
"""

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Generic, TypeVar

from tailrace.errors import QueueError, TailraceError
from tailrace.transfer.queue.messages import Answer
from tailrace.transfer.wire.messages import Failure
from tailrace.transfer.wire.server import Server, Ticket


class Timer:
    """A call at a set time; `cancel` it where it is not needed any more."""

    def __init__(self, timers: "Timers", then: Callable[[], None]) -> None:
        self._timers = timers
        self.then: Callable[[], None] | None = then

    def cancel(self) -> None:
        """Cancel the call; harmless when it was cancelled before or has been made."""
        if self.then is not None:
            self.then = None
            self._timers.forget_one()


class Timers:
    """Calls by their times. The cancelled ones take no more room than the others."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._count = 0
        self._cancelled = 0

    def __len__(self) -> int:
        """The number of entries that are kept, including cancelled ones."""
        return len(self._heap)

    def at(self, when: float, then: Callable[[], None]) -> Timer:
        """Call `then` at the time `when`."""
        self._count += 1
        timer = Timer(self, then)
        heapq.heappush(self._heap, (when, self._count, timer))
        return timer

    @property
    def next(self) -> float | None:
        """The time of the next call; None where there is none."""
        while self._heap and self._heap[0][2].then is None:
            heapq.heappop(self._heap)
            self._cancelled -= 1
        return self._heap[0][0] if self._heap else None

    def run(self, now: float) -> None:
        """Make the calls that are due, in the order of their times."""
        while (when := self.next) is not None and when <= now:
            timer = heapq.heappop(self._heap)[2]
            then, timer.then = timer.then, None
            assert then is not None, "cancelled ones are gone"
            then()

    def forget_one(self) -> None:
        """Count a cancelled timer, and remove the cancelled ones when they are more than half of all.

        Without that, a claim that may wait an hour and is served at once would leave an entry for an hour.
        """
        self._cancelled += 1
        if self._cancelled > 64 and 2 * self._cancelled > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].then is not None]
            heapq.heapify(self._heap)
            self._cancelled = 0


class Wait(Enum):
    """The result of an attempt that brings no answer."""

    HERE = "here"
    """The request has to wait on, and so have those behind it."""
    ASIDE = "aside"
    """The request has to wait on, but those behind it may try."""
    OVER = "over"
    """The request leaves the line; it is answered later, when its work is done."""


class Waiter(ABC):
    """A request that may have to wait for its answer."""

    def __init__(self, ticket: Ticket, wait_s: float) -> None:
        """`wait_s`: seconds after which it gives up."""
        self.ticket = ticket
        self.wait_s = wait_s
        self.since = 0.0
        """The time at which it joined a line."""
        self.timer: Timer | None = None

    @abstractmethod
    def attempt(self) -> Answer | Wait:
        """Return the answer if it can be had now.

        Raises:
            QueueError: the request fails, and this error is its answer.
        """

    @abstractmethod
    def late(self) -> QueueError:
        """The error to answer with when the time is over."""

    @abstractmethod
    def count_wait(self, seconds: float) -> None:
        """Add the seconds that the request has spent in a line to the statistics."""

    @property
    def limit_s(self) -> float:
        """`wait_s` rounded for an error text: a client sends what is left of its limit when the message leaves."""
        return float(f"{self.wait_s:.3g}")


W = TypeVar("W", bound=Waiter)


class WaitLine(Generic[W]):
    """Requests that wait in one line."""

    def __init__(self, server: Server, timers: Timers, changed: Callable[[], object]) -> None:
        """`changed`: called when a waiter has given up, since the next one may get what it could not."""
        self._changed = changed
        self._server = server
        self._timers = timers
        self._waiters: deque[W] = deque()

    def __len__(self) -> int:
        return len(self._waiters)

    def join(self, waiter: W) -> None:
        """Join the end of the line; call `serve` whenever something changes."""
        waiter.since = self._server.now
        waiter.timer = self._timers.at(waiter.since + waiter.wait_s, partial(self._give_up, waiter))
        self._waiters.append(waiter)

    @property
    def head(self) -> W:
        """The first waiter."""
        return self._waiters[0]

    def serve(self) -> tuple[bool, bool]:
        """Try the waiters in order. Return whether one was served, and whether one now blocks those behind it."""
        served, aside = False, 0
        while aside < len(self._waiters):
            waiter = self._waiters[aside]
            try:
                answer = waiter.attempt()
            except QueueError as error:
                self._fail(waiter, error)
                continue
            match answer:
                case Wait.HERE:
                    return served, True
                case Wait.ASIDE:
                    aside += 1
                case Wait.OVER:
                    self._leave(waiter)
                    served = True
                case _:
                    self._leave(waiter)
                    self._server.reply(waiter.ticket, answer)
                    served = True
        return served, False

    def send_away(self, error: Callable[[], TailraceError]) -> None:
        """Answer all waiters with an error."""
        for waiter in list(self._waiters):
            self._fail(waiter, error())

    def forget(self, gone: Callable[[Ticket], bool]) -> bool:
        """Drop the waiters whose tickets are `gone`; return whether there were any.

        A client that was only thought to be gone, such as one that was stopped for a while, sends its requests again.
        They are carried out anew then.
        """
        leaving = [waiter for waiter in self._waiters if gone(waiter.ticket)]
        for waiter in leaving:
            self._leave(waiter)
            self._server.answers.cancel(waiter.ticket)
        return bool(leaving)

    def _leave(self, waiter: W) -> None:
        if waiter.timer is not None:
            waiter.timer.cancel()
        self._waiters.remove(waiter)
        waiter.count_wait(self._server.now - waiter.since)

    def _fail(self, waiter: W, error: TailraceError) -> None:
        self._leave(waiter)
        self._server.reply(waiter.ticket, Failure.of(error))

    def _give_up(self, waiter: W) -> None:
        self._fail(waiter, waiter.late())
        self._changed()
