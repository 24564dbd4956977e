"""Who has died: signs of life of the processes of a queue, deaths, and when each one may be started again.

All times are those of one clock, which stands still while this process is stopped: nobody counts as silent for what
could not be heard.
"""

import math
from collections import deque
from collections.abc import Callable, Collection

from tailrace.errors import QueueError
from tailrace.transfer.wire.clock import LONGEST_STEP_S, RunningClock

MAX_DEATHS, DEATHS_WITHIN_S = 5, 600.0
"""Processes that may die within this time, all together; one more and the queue is given up. One that hangs again and
again dies after START_LIMIT_S each time."""
_RESTART_PAUSE_S = 2.0
"""Before a process is started again that could not serve: its port may be free by then."""
START_LIMIT_S = 60.0
"""For a process to serve, and for all of them to be there, on a busy machine."""
_SILENCE_LIMIT_S = 20.0
"""Without a sign of life from one that serves. Clients give it up after 30 s: it has been started again by then."""


class Vitals:
    """Of the processes of one queue, by name."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """`clock`: else a `RunningClock`."""
        self._clock = clock or RunningClock()
        self._begun = math.inf
        self._heard: dict[str, float] = {}
        """When each one that runs was heard, or was started."""
        self._listening: set[str] = set()
        self._due: dict[str, float] = {}
        """When those are started again that have died."""
        self._deaths: deque[float] = deque()

    @property
    def listening(self) -> Collection[str]:
        """Those that serve."""
        return self._listening

    @property
    def running(self) -> Collection[str]:
        """Those that were started and have not died."""
        return self._heard.keys()

    @property
    def due(self) -> list[str]:
        """Those that are to be started again now."""
        now = self._clock()
        return [name for name, when in self._due.items() if when <= now]

    @property
    def is_late(self) -> bool:
        """Whether all of them should have been there by now."""
        return self._clock() - self._begun > START_LIMIT_S

    @property
    def patience_s(self) -> float:
        """Seconds until something may have to be done that nobody says. The clock wants to be looked at that often."""
        now = self._clock()
        return max(0.0, min([LONGEST_STEP_S, *(when - now for when in self._due.values())]))

    def start(self, name: str) -> None:
        """It is started, perhaps again."""
        self._due.pop(name, None)
        self._heard[name] = now = self._clock()
        self._begun = min(self._begun, now)

    def hear(self, name: str) -> None:
        """It has given a sign of life."""
        self._heard[name] = self._clock()

    def listen(self, name: str) -> None:
        """It serves from now on."""
        self._listening.add(name)

    def silent(self) -> dict[str, float]:
        """Those that were stopped or hang, with the seconds that each had. They are named once."""
        now = self._clock()
        limits = {name: _SILENCE_LIMIT_S if name in self._listening else START_LIMIT_S for name in self._heard}
        found = {name: limit_s for name, limit_s in limits.items() if now - self._heard[name] > limit_s}
        self._heard |= dict.fromkeys(found, now)
        return found

    def die(self, name: str, obituary: str) -> float:
        """It has died, as `obituary` says. Returns after how many seconds it is due: one that never served, later.

        Raises:
            QueueError: too many have.
        """
        now = self._clock()
        while self._deaths and self._deaths[0] < now - DEATHS_WITHIN_S:
            self._deaths.popleft()
        self._deaths.append(now)
        if len(self._deaths) > MAX_DEATHS:
            raise QueueError(
                f"{obituary}; with it, {len(self._deaths)} of its processes have within {DEATHS_WITHIN_S:g} s: given up"
            )
        pause_s = 0.0 if name in self._listening else _RESTART_PAUSE_S
        self._due[name] = now + pause_s
        self._listening.discard(name)
        del self._heard[name]
        return pause_s
