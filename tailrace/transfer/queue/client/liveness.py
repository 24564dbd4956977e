"""Asks the controller whether a silent unit is still there: it knows long before a client has to give up.

    call ──▶ unit, no sign of life ──ReadTable──▶ controller ──Table──▶ not among the units: lost; else it is waited for

A restarted controller does not know all units at once: until it has recovered, nothing is concluded. Several
controllers are asked one after the other: a unit that none of them names is lost.

Waiting: nothing waits here. If the controller does not answer either, the calls keep waiting.
"""

import math
import time
from collections.abc import Callable, Sequence, Set

from tailrace.transfer.queue.messages import CONTROLLER, STORAGE_UNIT, ReadTable, Table
from tailrace.transfer.wire.calls import Call, Outcome
from tailrace.transfer.wire.frames import Reply
from tailrace.transfer.wire.peers import Peers

_AGAIN_S = 0.2
"""Seconds between an answer and the next question: a unit that is only slow may be silent for long."""


class LivenessCheck(Peers):
    """The liveness of a queue's servers, for one client."""

    def __init__(self, controllers: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        """`controllers`: the endpoint of each."""
        self._controllers = controllers
        self._clock = clock
        self._ask_at = -math.inf
        self._asked = False
        self._asked_about: Set[str] = set()
        self._tables: list[Table] = []
        """The answers about these units, of the first controllers."""

    def name(self, endpoint: str) -> str:
        """See `Peers.name`."""
        return CONTROLLER if endpoint in self._controllers else STORAGE_UNIT

    def question(self, silent: Set[str]) -> Call | None:
        """See `Peers.question`."""
        units = silent - {*self._controllers}
        if not units and not self._asked:
            self._tables.clear()  # they would be old when they are needed
        if not units or self._asked or self._clock() < self._ask_at:
            return None
        if not self._tables:
            self._asked_about = units
        self._asked = True
        return Call(self._controllers[len(self._tables)], ReadTable())

    def hear(self, outcome: Outcome) -> None:
        """See `Peers.hear`."""
        self._asked = False
        if isinstance(outcome, Reply) and isinstance(outcome.answer, Table) and not outcome.answer.recovering:
            self._tables.append(outcome.answer)
        else:
            self._tables.clear()
        if not 0 < len(self._tables) < len(self._controllers):
            self._ask_at = self._clock() + _AGAIN_S

    def gone(self, silent: Set[str]) -> Set[str]:
        """See `Peers.gone`."""
        if len(self._tables) < len(self._controllers):
            return set()
        listed = {endpoint for table in self._tables for unit in table.units for endpoint in unit.endpoints}
        self._tables.clear()
        return (self._asked_about - listed) & silent
