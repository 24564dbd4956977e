"""The base of `RemoteQueue` and `SyncQueue`: construction, and the limits of their calls."""

from typing import Generic, TypeVar

from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.client import checks
from tailrace.transfer.queue.client.liveness import LivenessCheck
from tailrace.transfer.queue.client.one import OneController
from tailrace.transfer.queue.client.operations import Operations
from tailrace.transfer.queue.client.session import Session
from tailrace.transfer.queue.client.several import SeveralControllers
from tailrace.transfer.queue.messages import QUEUE
from tailrace.transfer.wire.client import ClientBase
from tailrace.transfer.wire.connection import Patience
from tailrace.transfer.wire.handshake import check_name

C = TypeVar("C", bound=ClientBase)


def operations_of(address: QueueAddress, *, shared_memory: bool) -> Operations:
    """Make the operations of a new client of the queue at `address`. `shared_memory`: see `QueueClient`.

    Raises:
        UserError: the queue cannot be reached from this host.
    """
    sessions = [Session(controller, shared_memory=shared_memory) for controller in address.controllers]
    return OneController(sessions[0]) if len(sessions) == 1 else SeveralControllers(sessions)


class QueueClient(Generic[C]):
    """A client of a queue that runs in separate processes. It belongs to the process that made it."""

    _kind: type[C]
    """The class of the client that carries out the operations."""

    def __init__(
        self,
        address: QueueAddress,
        *,
        name: str,
        timeout_s: float = 3600.0,
        shared_memory: bool = True,
        limit_s: float = 30.0,
    ) -> None:
        """`name`: the client's name, for people.

        `timeout_s`: the default timeout of puts, claims and writes that find no room. `shared_memory`: whether cells
        may pass through the memory of units on this host. `limit_s`: seconds without a sign of life after which either
        side takes the other for dead.

        Raises:
            UserError: `address` is not a QueueAddress, or the queue cannot be reached from this host.
            WireError: the token is too short, or the name cannot be sent.
            QueueError: `timeout_s` or `limit_s` is not a valid number of seconds.
        """
        checks.check_address(address)
        check_name(name)
        self._owner = checks.Owner()
        self._address = address
        self._name = name
        self._timeout_s = checks.seconds("timeout_s", timeout_s)
        self._limit_s = checks.limit_seconds(limit_s)
        self._operations = operations_of(address, shared_memory=shared_memory)
        self._client = self._connect()

    @property
    def controllers(self) -> int:
        """The number of the queue's controllers."""
        return len(self._address.each)

    def _connect(self) -> C:
        peers, patience = LivenessCheck(self._address.controllers), Patience.within(self._limit_s)
        return self._kind(self._name, self._address.token, QUEUE, peers=peers, patience=patience)

    def _limit(self, timeout: float | None) -> float:
        """The seconds that a call may wait: `timeout`, or the client's default for None."""
        return self._timeout_s if timeout is None else checks.seconds("timeout", timeout)

    def _within(self, timeout: float | None) -> float | None:
        """The seconds for a whole operation whose calls may wait `timeout` together. None: they end by themselves.

        Raises:
            QueueError: this process was forked from the one that made the client.
        """
        self._owner.check()
        return None if timeout is None else timeout + self._limit_s
