"""A look at a queue from outside, with a client that is there for one question."""

from typing import TypeVar

from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.base import QueueStats
from tailrace.transfer.queue.messages import Answer, Counted, Look, Request, Stats, Welcome
from tailrace.transfer.wire.calls import Call, ask
from tailrace.transfer.wire.connection import Patience
from tailrace.transfer.wire.sync import SyncClient

A = TypeVar("A", bound=Answer)


def look(address: QueueAddress, *, name: str, limit_s: float) -> QueueStats:
    """The counts of the queue at `address`. `name`: of who asks, for people.

    Raises:
        UserError: it cannot be reached from this machine.
        PeerLost: no answer within `limit_s`.
        WireError: the queue has another token.
    """
    return _ask(address, Stats(), Counted, name, limit_s).stats


def greet(address: QueueAddress, *, name: str, limit_s: float) -> Welcome:
    """The units, columns and tasks of the queue at `address`; otherwise as `look`."""
    return _ask(address, Look(), Welcome, name, limit_s)


def _ask(address: QueueAddress, question: Request, kind: type[A], name: str, limit_s: float) -> A:
    with SyncClient(name, address.token, patience=Patience(limit_s=limit_s, retry_s=limit_s / 4)) as client:
        return client.run(ask(Call(address.endpoint, question), kind))
