"""Whether a server that is silent is still there: the controller knows, long before a client has to give up.

    call ──▶ unit, no sign of life ──Look──▶ controller ──Welcome──▶ not among the units: lost; else it is waited for

A controller that was started anew does not know all units again at once: until it does, nothing is concluded.

Who waits on whom: nobody. A face asks while calls are in doubt, one question at a time; a controller that does not
answer either leaves them waiting.
"""

import math
import time
from collections.abc import Callable, Mapping

from tailrace.transfer.queue.messages import Look, Welcome
from tailrace.transfer.wire.calls import Call, Outcome
from tailrace.transfer.wire.connection import Connection
from tailrace.transfer.wire.frames import Reply

_AGAIN_S = 0.2
"""Between an answer and the next question: doubt about a server that is only slow may last."""


class Doubts:
    """Of one client."""

    def __init__(self, controller: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`controller`: its endpoint; None for a client that talks to nobody else."""
        self._controller = controller
        self._clock = clock
        self._ask_at = -math.inf
        self._asked = False
        self._asked_about: set[str] = set()
        self._listed: set[str] | None = None

    def question(self, connections: Mapping[str, Connection]) -> Call | None:
        """What to ask, where one of `connections`, by endpoint, is in doubt. `take` gets what becomes of it."""
        if self._controller is None or self._asked or self._clock() < self._ask_at:
            return None
        doubtful = {to for to, connection in connections.items() if to != self._controller and connection.in_doubt}
        if not doubtful:
            return None
        self._asked, self._asked_about = True, doubtful
        return Call(self._controller, Look())

    def take(self, outcome: Outcome) -> None:
        """The answer."""
        self._asked = False
        self._ask_at = self._clock() + _AGAIN_S
        if isinstance(outcome, Reply) and isinstance(outcome.answer, Welcome) and not outcome.answer.recovering:
            self._listed = {endpoint for unit in outcome.answer.units for endpoint in unit.endpoints}

    def gone(self, connections: Mapping[str, Connection]) -> list[str]:
        """The endpoints that were asked about, are still in doubt, and are no unit's any more."""
        if self._listed is None:
            return []
        gone = self._asked_about - self._listed
        self._listed = None
        return [to for to in gone if to in connections and connections[to].in_doubt]
