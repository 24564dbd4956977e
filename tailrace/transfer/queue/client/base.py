"""What `RemoteQueue` and `SyncQueue` share: how they are made, and the limits of their calls."""

from typing import Generic, TypeVar

from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.client import checks
from tailrace.transfer.queue.client.liveness import LivenessCheck
from tailrace.transfer.queue.client.session import Session
from tailrace.transfer.queue.messages import QUEUE
from tailrace.transfer.wire.client import ClientBase
from tailrace.transfer.wire.connection import Patience
from tailrace.transfer.wire.handshake import check_name

C = TypeVar("C", bound=ClientBase)


class QueueClient(Generic[C]):
    """A client of a queue in processes of its own. It belongs to the process that made it."""

    _kind: type[C]
    """Of the client that carries out its operations."""

    def __init__(
        self,
        address: QueueAddress,
        *,
        name: str,
        timeout_s: float = 3600.0,
        shared_memory: bool = True,
        limit_s: float = 30.0,
    ) -> None:
        """`name`: of this client, for people.

        `timeout_s`: of puts, claims and writes that find no room, where they name none. `shared_memory`: whether cells
        may pass through the memory of units on this host. `limit_s`: seconds without a sign of life after which either
        side takes the other for dead.

        Raises:
            UserError: that is no address, or the queue cannot be reached from this host.
            WireError: the token is too short, or the name cannot be sent.
            QueueError: a number of seconds that is none.
        """
        checks.check_address(address)
        check_name(name)
        self._owner = checks.Owner()
        self._address = address
        self._name = name
        self._timeout_s = checks.seconds("timeout_s", timeout_s)
        self._limit_s = checks.limit_seconds(limit_s)
        self._session = Session(address.endpoint, shared_memory=shared_memory)
        self._client = self._connect()

    def _connect(self) -> C:
        peers, patience = LivenessCheck(self._address.endpoint), Patience.within(self._limit_s)
        return self._kind(self._name, self._address.token, QUEUE, peers=peers, patience=patience)

    def _limit(self, timeout: float | None) -> float:
        """Seconds for a call that names `timeout`."""
        return self._timeout_s if timeout is None else checks.seconds("timeout", timeout)

    def _within(self, timeout: float | None) -> float | None:
        """Seconds for an operation whose calls may wait `timeout` together; None for one that ends by itself.

        Raises:
            QueueError: in a process that was forked from the one that made this client.
        """
        self._owner.check()
        return None if timeout is None else timeout + self._limit_s
