"""The vitals of a queue's processes: signs of life, deaths, and when each process may be restarted.

All times are from one clock, which stands still while this process is stopped. So no process counts as silent for the
time in which this one could not hear it.
"""

import math
from collections import deque
from collections.abc import Callable, Collection

from tailrace.errors import QueueError
from tailrace.transfer.wire.clock import LONGEST_STEP_S, RunningClock

MAX_DEATHS, DEATHS_WITHIN_S = 5, 600.0
"""The number of deaths that the queue survives within this time, in seconds, over all processes. At one more it is
given up. A process that hangs at every start dies after START_LIMIT_S each time."""
_RESTART_PAUSE_S = 2.0
"""Seconds before the restart of a process that never served: its port may be free by then."""
START_LIMIT_S = 60.0
"""Seconds for a process to serve, and for the whole queue to be ready, on a busy machine."""
_SILENCE_LIMIT_S = 20.0
"""Seconds without a sign of life after which a process that serves is killed. Clients give up after 30 s: by then it is
restarted."""


class Vitals:
    """The signs of life and the deaths of one queue's processes, by name."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """`clock`: returns seconds; by default a `RunningClock`."""
        self._clock = clock or RunningClock()
        self._begun = math.inf
        self._heard: dict[str, float] = {}
        """The time at which each running process was last heard, or was started."""
        self._listening: set[str] = set()
        self._due: dict[str, float] = {}
        """The time at which each dead process is to be restarted."""
        self._deaths: deque[float] = deque()

    @property
    def listening(self) -> Collection[str]:
        """The processes that serve."""
        return self._listening

    @property
    def running(self) -> Collection[str]:
        """The processes that were started and have not died."""
        return self._heard.keys()

    @property
    def due(self) -> list[str]:
        """The processes that are to be restarted now."""
        now = self._clock()
        return [name for name, when in self._due.items() if when <= now]

    @property
    def is_late(self) -> bool:
        """Whether the limit for the whole queue to be ready has passed."""
        return self._clock() - self._begun > START_LIMIT_S

    @property
    def patience_s(self) -> float:
        """The seconds until a restart may be due, and at most the longest step between two looks at the clock."""
        now = self._clock()
        return max(0.0, min([LONGEST_STEP_S, *(when - now for when in self._due.values())]))

    def start(self, name: str) -> None:
        """Record that a process was started or restarted."""
        self._due.pop(name, None)
        self._heard[name] = now = self._clock()
        self._begun = min(self._begun, now)

    def hear(self, name: str) -> None:
        """Record a sign of life."""
        self._heard[name] = self._clock()

    def leave(self, name: str) -> None:
        """Forget a process that has ended on purpose and is not restarted."""
        self._listening.discard(name)
        self._heard.pop(name, None)

    def listen(self, name: str) -> None:
        """Record that a process serves from now on."""
        self._listening.add(name)

    def silent(self) -> dict[str, float]:
        """Return the processes that are stopped or hang, each with the limit in seconds that it exceeded.

        Each one is returned once: its time then begins again.
        """
        now = self._clock()
        limits = {name: _SILENCE_LIMIT_S if name in self._listening else START_LIMIT_S for name in self._heard}
        found = {name: limit_s for name, limit_s in limits.items() if now - self._heard[name] > limit_s}
        self._heard |= dict.fromkeys(found, now)
        return found

    def die(self, name: str, obituary: str) -> float:
        """Record a death. Return the seconds until the restart: 0, or more for a process that never served.

        `obituary`: how it died, for the error.

        Raises:
            QueueError: too many processes have died.
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
