"""One question to a queue from outside, with a client that lives for that question alone."""

from typing import TypeVar

from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.base import QueueStats
from tailrace.transfer.queue.client.liveness import LivenessCheck
from tailrace.transfer.queue.messages import QUEUE, Counted, ReadTable, Retire, Stats, Table
from tailrace.transfer.wire.calls import Call, ask
from tailrace.transfer.wire.connection import Patience
from tailrace.transfer.wire.messages import Accepted, Message
from tailrace.transfer.wire.sync import SyncClient

A = TypeVar("A", bound=Message)


def read_stats(address: QueueAddress, *, name: str, limit_s: float) -> QueueStats:
    """Return the counts of the queue at `address`. `name`: the caller's name, for people.

    Raises:
        UserError: the queue cannot be reached from this machine.
        PeerLost: no answer within `limit_s` seconds.
        WireError: the queue has another token.
    """
    return _ask(address, Stats(), Counted, name, limit_s).stats


def read_table(address: QueueAddress, *, name: str, limit_s: float) -> Table:
    """Return the units, columns and tasks of the queue at `address`. Arguments and errors: see `read_stats`."""
    return _ask(address, ReadTable(), Table, name, limit_s)


def retire_unit(address: QueueAddress, name: str, *, limit_s: float) -> None:
    """Have the unit `name` leave the queue at `address`, which takes a while. Other errors: see `read_stats`.

    Raises:
        UserError: there is no such unit, or it is the last.
    """
    _ask(address, Retire(name), Accepted, "units", limit_s)


def _ask(address: QueueAddress, question: Message, kind: type[A], name: str, limit_s: float) -> A:
    peers, patience = LivenessCheck(address.endpoint), Patience(limit_s=limit_s, retry_s=limit_s / 4)
    with SyncClient(name, address.token, QUEUE, peers=peers, patience=patience) as client:
        return client.run(ask(Call(address.endpoint, question), kind))
