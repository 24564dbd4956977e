"""What the operations of one client share: the table, where units are, their memory, and the time."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

from tailrace.config.columns import ColumnKind
from tailrace.errors import PeerLost, StaleRowError, StorageFull, TailraceError
from tailrace.transfer.queue.base import Claim
from tailrace.transfer.queue.cells import PartCodec
from tailrace.transfer.queue.client.directory import Directory
from tailrace.transfer.queue.client.shared_memory import Memory
from tailrace.transfer.queue.messages import Unit
from tailrace.transfer.queue.rows.schema import Schema
from tailrace.transfer.wire.calls import Call, Operation, Step, ask
from tailrace.transfer.wire.messages import Accepted, Beat, Message

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
_ACKED_LEASES = 4096
"""Of which it is remembered how many rows were acked."""
_AT_ONCE_S = 0.01
"""Who is admitted within so many seconds has not had to wait."""
_TELL_S = 10.0
"""After which somebody should know what keeps failing: a storage that is too small waits for what never comes."""

PASSING = (PeerLost, StaleRowError, StorageFull)
"""Errors of units that another try may not meet."""

_log = logging.getLogger(__name__)


class Session:
    """Of one client."""

    columns: Mapping[str, ColumnKind]
    """Those of the queue; like all that is said of its table, known after `prepare`."""
    schema: Schema
    codec: PartCodec

    def __init__(self, controller: str, *, shared_memory: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """`controller`: its endpoint. `clock`: seconds that never go back."""
        self.memory = Memory(shared=shared_memory)
        self.directory = Directory(controller, dropped=self.memory.forget)
        self._clock = clock
        self.later: list[Call] = []
        """To be sent with the next step of an operation, its end, or a sign of life; nobody waits for the answers."""
        self._prepared = False
        self.likely_units = LikelyUnits()
        self.acked = Acked()

    @property
    def controller(self) -> str:
        """Its endpoint."""
        return self.directory.controller

    @property
    def now(self) -> float:
        """Seconds, by its clock."""
        return self._clock()

    def prepare(self) -> Operation[None]:
        """Learn the table of the queue, once."""
        if self._prepared:
            return
        table = yield from self.directory.read_table()
        self.columns = table.columns
        self.codec = PartCodec(table.columns)
        self.schema = Schema(table.tasks)
        self._prepared = True

    def tell(self, message: Message) -> Operation[None]:
        """Have the controller accept a message."""
        yield from ask(Call(self.controller, message), Accepted)

    def due(self) -> list[Call]:
        """What is to be sent along now."""
        calls = [*self.later, *self.memory.due()]
        self.later.clear()
        return calls

    def signs_of_life(self, limit_s: float) -> list[Call]:
        """For the controller, and for the units that keep memory as it is; the next ones come before `limit_s`."""
        return [Call(to, Beat(limit_s)) for to in (self.controller, *self.memory.holders)]

    def tries(self, timeout: float) -> "Tries":
        """Of something that may take `timeout` seconds."""
        return Tries(self._clock, timeout)


class LikelyUnits:
    """Where the next rows are likely to go, by the puts before."""

    def __init__(self) -> None:
        self._is_clear = True
        self._replicas = 1
        self._turn = 0

    def among(self, known: Sequence[Unit]) -> list[Unit]:
        """Those of `known` that new rows are likely to go to: each in its turn, none where puts have had to wait."""
        if not known or not self._is_clear:
            return []
        self._turn += 1
        return [known[(self._turn + place) % len(known)] for place in range(min(self._replicas, len(known)))]

    def learn(self, waited_s: float, replicas: int) -> None:
        """Rows were admitted after so many seconds, to so many units; 0 where the controller has written them."""
        self._is_clear = waited_s < _AT_ONCE_S
        self._replicas = replicas or self._replicas


class Acked:
    """How many rows of a lease this client has acked, for as many leases as anybody is at."""

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}

    def add(self, lease_id: int, rows: int) -> None:
        """So many more."""
        self._rows[lease_id] = self._rows.pop(lease_id, 0) + rows
        if len(self._rows) > _ACKED_LEASES:
            del self._rows[next(iter(self._rows))]

    def all_of(self, claim: Claim) -> bool:
        """Whether no row of `claim` is left, as far as is known here."""
        return 0 < len(claim.rows) <= self._rows.get(claim.lease_id, 0)


class Tries:
    """Of something that may go well a moment later, with growing pauses, within a limit."""

    def __init__(self, clock: Callable[[], float], timeout: float) -> None:
        self._clock = clock
        self._tell_at = clock() + _TELL_S
        self._deadline = clock() + timeout
        self._pause_s = _FIRST_PAUSE_S

    @property
    def left_s(self) -> float:
        """Seconds."""
        return max(0.0, self._deadline - self._clock())

    def again(self, error: TailraceError) -> Operation[None]:
        """Wait a moment after a try that failed with `error`, which is raised where no time is left for another."""
        left_s = self.left_s
        if not left_s:
            raise error
        if self._clock() >= self._tell_at:
            self._tell_at = math.inf
            _log.warning("%s; tried again for another %.0f s", error, left_s)
        yield Step([], pause_s=min(self._pause_s, left_s))
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
