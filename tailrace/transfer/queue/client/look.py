"""One question to a queue from outside, with a client that lives for that question alone."""

from typing import TypeVar

from tailrace.errors import UserError
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.base import QueueStats
from tailrace.transfer.queue.client.base import operations_of
from tailrace.transfer.queue.client.liveness import LivenessCheck
from tailrace.transfer.queue.messages import QUEUE, ReadTable, Retire, Table
from tailrace.transfer.wire.calls import Call, Operation, ask
from tailrace.transfer.wire.connection import Patience
from tailrace.transfer.wire.messages import Accepted
from tailrace.transfer.wire.sync import SyncClient

T = TypeVar("T")

_UNITS = "units"
"""The name of a client that asks on behalf of a unit."""


def read_stats(address: QueueAddress, *, name: str, limit_s: float) -> QueueStats:
    """Return the counts of the queue at `address`. `name`: the caller's name, for people.

    Raises:
        UserError: the queue cannot be reached from this machine.
        PeerLost: no answer within `limit_s` seconds.
        WireError: the queue has another token.
    """
    return _run(address, operations_of(address, shared_memory=False).stats(), name, limit_s)


def read_table(address: QueueAddress, *, name: str, limit_s: float) -> Table:
    """Return the units, columns and tasks of the queue at `address`. Of several controllers, the first answers.

    Arguments and errors: see `read_stats`.
    """
    return _run(address, ask(Call(address.endpoint, ReadTable()), Table), name, limit_s)


def retire_unit(address: QueueAddress, name: str, *, limit_s: float) -> None:
    """Have the unit `name` leave the queue at `address`, which takes a while. Other errors: see `read_stats`.

    Raises:
        UserError: there is no such unit, or it is the last of its controller.
    """
    owner = address
    if address.others:
        owners = {unit.name: own for own, stats in _of_each(address, limit_s) for unit in stats.units}
        if name not in owners:
            raise UserError(f"the queue has no unit {name!r}; its units are {', '.join(owners)}")
        owner = owners[name]
    _run(owner, ask(Call(owner.endpoint, Retire(name)), Accepted), _UNITS, limit_s)


def fullest(address: QueueAddress, *, limit_s: float) -> QueueAddress:
    """Return the address, alone, of the controller whose units have the least room left. Errors: see `read_stats`."""
    room = [
        (sum(unit.max_bytes - unit.bytes for unit in stats.units if unit.alive), number, own)
        for number, (own, stats) in enumerate(_of_each(address, limit_s))
    ]
    return min(room)[-1]


def _of_each(address: QueueAddress, limit_s: float) -> list[tuple[QueueAddress, QueueStats]]:
    """The address and the counts of each controller."""
    return [(own, read_stats(own, name=_UNITS, limit_s=limit_s)) for own in address.each]


def _run(address: QueueAddress, operation: Operation[T], name: str, limit_s: float) -> T:
    peers, patience = LivenessCheck(address.controllers), Patience(limit_s=limit_s, retry_s=limit_s / 4)
    with SyncClient(name, address.token, QUEUE, peers=peers, patience=patience) as client:
        return client.run(operation)
