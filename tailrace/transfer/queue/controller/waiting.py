"""Who waits at a controller, and for how long.

A line is first come, first served: its head alone tries, so a big request is never overtaken for ever by small ones.
One that stands aside, since it waits for something that nobody else does, lets the others pass. Nobody waits longer
than it asked to.
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
    """One thing to do; `cancel` it where it is not needed any more."""

    def __init__(self, timers: "Timers", then: Callable[[], None]) -> None:
        self._timers = timers
        self.then: Callable[[], None] | None = then

    def cancel(self) -> None:
        """Do nothing when the time comes; harmless twice, and when it has come."""
        if self.then is not None:
            self.then = None
            self._timers.forget_one()


class Timers:
    """Things to do by their times. Those that were cancelled take no more room than those that were not."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._count = 0
        self._cancelled = 0

    def __len__(self) -> int:
        """Entries that are kept, those that were cancelled included."""
        return len(self._heap)

    def at(self, when: float, then: Callable[[], None]) -> Timer:
        """Do `then` at the time `when`."""
        self._count += 1
        timer = Timer(self, then)
        heapq.heappush(self._heap, (when, self._count, timer))
        return timer

    @property
    def next(self) -> float | None:
        """When something is due."""
        while self._heap and self._heap[0][2].then is None:
            heapq.heappop(self._heap)
            self._cancelled -= 1
        return self._heap[0][0] if self._heap else None

    def run(self, now: float) -> None:
        """Do what is due, in the order of the times."""
        while (when := self.next) is not None and when <= now:
            timer = heapq.heappop(self._heap)[2]
            then, timer.then = timer.then, None
            assert then is not None, "cancelled ones are gone"
            then()

    def forget_one(self) -> None:
        """A timer was cancelled: a claim that may wait for an hour and is served at once leaves one for an hour."""
        self._cancelled += 1
        if self._cancelled > 64 and 2 * self._cancelled > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].then is not None]
            heapq.heapify(self._heap)
            self._cancelled = 0


class Wait(Enum):
    """What an attempt returns instead of an answer."""

    HERE = "here"
    """It has to wait on, and so have those behind it."""
    ASIDE = "aside"
    """It has to wait on, the others have not."""
    OVER = "over"
    """It got what it waited for, and will be answered when that is done."""


class Waiter(ABC):
    """A request that may have to wait for its answer."""

    def __init__(self, ticket: Ticket, wait_s: float) -> None:
        """`wait_s`: it gives up after so many seconds."""
        self.ticket = ticket
        self.wait_s = wait_s
        self.since = 0.0
        """When it joined a line."""
        self.timer: Timer | None = None

    @abstractmethod
    def attempt(self) -> Answer | Wait:
        """The answer, if it can be had now.

        Raises:
            QueueError: which is the answer.
        """

    @abstractmethod
    def late(self) -> QueueError:
        """The answer when its time is over."""

    @abstractmethod
    def count_wait(self, seconds: float) -> None:
        """It has its answer after so long in a line."""

    @property
    def limit_s(self) -> float:
        """`wait_s` for an error: a client names what is left of its limit when the message leaves."""
        return float(f"{self.wait_s:.3g}")


W = TypeVar("W", bound=Waiter)


class WaitLine(Generic[W]):
    """Waiters for one thing."""

    def __init__(self, server: Server, timers: Timers, changed: Callable[[], object]) -> None:
        """`changed`: called when one has given up, and the next may get what it could not."""
        self._changed = changed
        self._server = server
        self._timers = timers
        self._waiters: deque[W] = deque()

    def __len__(self) -> int:
        return len(self._waiters)

    def join(self, waiter: W) -> None:
        """Wait; `serve` is called whenever something changes."""
        waiter.since = self._server.now
        waiter.timer = self._timers.at(waiter.since + waiter.wait_s, partial(self._give_up, waiter))
        self._waiters.append(waiter)

    @property
    def head(self) -> W:
        """The first waiter."""
        return self._waiters[0]

    def serve(self) -> tuple[bool, bool]:
        """Something may have changed. Whether somebody got what it waited for; and whether somebody bars the way."""
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
        """Nobody gets anything any more."""
        for waiter in list(self._waiters):
            self._fail(waiter, error())

    def forget(self, gone: Callable[[Ticket], bool]) -> bool:
        """Tickets that nobody waits for any more; whether there were such."""
        leaving = [waiter for waiter in self._waiters if gone(waiter.ticket)]
        for waiter in leaving:
            self._leave(waiter)
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
