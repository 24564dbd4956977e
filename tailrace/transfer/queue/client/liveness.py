"""Asks the controller whether a silent unit is still there: it knows long before a client has to give up.

    call ──▶ unit, no sign of life ──ReadTable──▶ controller ──Table──▶ not among the units: lost; else it is waited for

A restarted controller does not know all units at once: until it has recovered, nothing is concluded.

Waiting: nothing waits here. If the controller does not answer either, the calls keep waiting.
"""

import math
import time
from collections.abc import Callable, Set

from tailrace.transfer.queue.messages import CONTROLLER, STORAGE_UNIT, ReadTable, Table
from tailrace.transfer.wire.calls import Call, Outcome
from tailrace.transfer.wire.frames import Reply
from tailrace.transfer.wire.peers import Peers

_AGAIN_S = 0.2
"""Seconds between an answer and the next question: a unit that is only slow may be silent for long."""


class LivenessCheck(Peers):
    """The liveness of a queue's servers, for one client."""

    def __init__(self, controller: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`controller`: its endpoint."""
        self._controller = controller
        self._clock = clock
        self._ask_at = -math.inf
        self._asked = False
        self._asked_about: Set[str] = set()
        self._listed: set[str] | None = None

    def name(self, endpoint: str) -> str:
        """See `Peers.name`."""
        return CONTROLLER if endpoint == self._controller else STORAGE_UNIT

    def question(self, silent: Set[str]) -> Call | None:
        """See `Peers.question`."""
        units = silent - {self._controller}
        if not units or self._asked or self._clock() < self._ask_at:
            return None
        self._asked, self._asked_about = True, units
        return Call(self._controller, ReadTable())

    def hear(self, outcome: Outcome) -> None:
        """See `Peers.hear`."""
        self._asked = False
        self._ask_at = self._clock() + _AGAIN_S
        if isinstance(outcome, Reply) and isinstance(outcome.answer, Table) and not outcome.answer.recovering:
            self._listed = {endpoint for unit in outcome.answer.units for endpoint in unit.endpoints}

    def gone(self, silent: Set[str]) -> Set[str]:
        """See `Peers.gone`."""
        if self._listed is None:
            return set()
        gone = (self._asked_about - self._listed) & silent
        self._listed = None
        return gone
