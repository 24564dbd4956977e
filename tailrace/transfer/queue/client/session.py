"""The state that the operations of one client share: the table, the units' addresses and memory, and the clock."""

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence

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
"""The number of leases for which the acked rows are remembered."""
_AT_ONCE_S = 0.01
"""A put that is admitted within this time, in seconds, did not have to wait."""
_TELL_S = 10.0
"""Seconds of failed tries before a warning: a storage that is too small would wait for room in vain."""

PASSING = (PeerLost, StaleRowError, StorageFull)
"""Errors of units that may be gone at the next try."""

_log = logging.getLogger(__name__)


class Session:
    """The shared state of one client's operations."""

    columns: Mapping[str, ColumnKind]
    """The queue's columns; like `schema`, `gathering` and `codec`, known after `prepare`."""
    schema: Schema
    gathering: Collection[str]
    """See `Table.gathering`."""
    codec: PartCodec

    def __init__(self, controller: str, *, shared_memory: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """`controller`: its endpoint. `clock`: monotonic time in seconds."""
        self.memory = Memory(shared=shared_memory)
        self.directory = Directory(controller, dropped=self.memory.forget)
        self._clock = clock
        self.later: list[Call] = []
        """Calls to send with the next step or end of an operation, or sign of life. Their answers are not awaited."""
        self._prepared = False
        self.likely_units = LikelyUnits()
        self.acked = Acked()

    @property
    def controller(self) -> str:
        """The endpoint of the controller."""
        return self.directory.controller

    @property
    def now(self) -> float:
        """The time in seconds, by the session's clock."""
        return self._clock()

    @property
    def is_prepared(self) -> bool:
        """Whether the queue's table is known."""
        return self._prepared

    def prepare(self, *, otherwise: Sequence[Call] = ()) -> Operation[None]:
        """Read the queue's table from the controller, once."""
        if self._prepared:
            return
        table = yield from self.directory.read_table(otherwise=otherwise)
        self.columns = table.columns
        self.codec = PartCodec(table.columns)
        self.schema = Schema(table.tasks)
        self.gathering = table.gathering
        self._prepared = True

    def tell(self, message: Message) -> Operation[None]:
        """Have the controller accept a message."""
        yield from ask(Call(self.controller, message), Accepted)

    def due(self) -> list[Call]:
        """Take the calls that are to be sent now: those put off, and the release of pins."""
        calls = [*self.later, *self.memory.due()]
        self.later.clear()
        return calls

    def signs_of_life(self, limit_s: float) -> list[Call]:
        """The signs of life for the controller and the units with pins. They promise the next within `limit_s`."""
        return [Call(to, Beat(limit_s)) for to in (self.controller, *self.memory.holders)]

    def tries(self, timeout: float) -> "Tries":
        """Begin tries that may take `timeout` seconds together."""
        return Tries(self._clock, timeout)


class LikelyUnits:
    """A guess at the units that the next rows go to, from earlier puts."""

    def __init__(self) -> None:
        self._is_clear = True
        self._replicas = 1
        self._turn = 0

    def among(self, known: Sequence[Unit]) -> list[Unit]:
        """Return the likely units among `known`: each in its turn, and none if the last put had to wait."""
        if not known or not self._is_clear:
            return []
        self._turn += 1
        return [known[(self._turn + place) % len(known)] for place in range(min(self._replicas, len(known)))]

    def learn(self, waited_s: float, replicas: int) -> None:
        """Note that rows were admitted after `waited_s` seconds to `replicas` units; 0 if the controller wrote them."""
        self._is_clear = waited_s < _AT_ONCE_S
        self._replicas = replicas or self._replicas


class Acked:
    """Counts the rows that this client has acked of each of its latest leases."""

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}

    def add(self, lease_id: int, rows: int) -> None:
        """Count `rows` more acked rows of a lease."""
        self._rows[lease_id] = self._rows.pop(lease_id, 0) + rows
        if len(self._rows) > _ACKED_LEASES:
            del self._rows[next(iter(self._rows))]

    def all_of(self, claim: Claim) -> bool:
        """Whether this client is known to have acked every row of `claim`."""
        return 0 < len(claim.rows) <= self._rows.get(claim.lease_id, 0)


class Tries:
    """Repeated tries of something that may succeed later, with growing pauses, within a limit."""

    def __init__(self, clock: Callable[[], float], timeout: float) -> None:
        self._clock = clock
        self._tell_at = clock() + _TELL_S
        self._deadline = clock() + timeout
        self._pause_s = _FIRST_PAUSE_S

    @property
    def left_s(self) -> float:
        """The seconds that are left for tries."""
        return max(0.0, self._deadline - self._clock())

    def again(self, error: TailraceError, *, otherwise: Sequence[Call] = ()) -> Operation[None]:
        """Pause after a try that failed with `error`. If no time is left, raise it instead. `otherwise`: see `Step`."""
        left_s = self.left_s
        if not left_s:
            raise error
        if self._clock() >= self._tell_at:
            self._tell_at = math.inf
            _log.warning("%s; tried again for another %.0f s", error, left_s)
        yield Step([], otherwise, pause_s=min(self._pause_s, left_s))
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
