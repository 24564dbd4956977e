"""A look at a queue from outside, with a client that is there for one question."""

from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.base import QueueStats
from tailrace.transfer.queue.wire.calls import Call, Operation, Step, expect
from tailrace.transfer.queue.wire.connection import Patience
from tailrace.transfer.queue.wire.frames import Reply
from tailrace.transfer.queue.wire.messages import Counted, Look, Request, Stats, Welcome
from tailrace.transfer.queue.wire.sync import SyncClient


def look(address: QueueAddress, *, name: str, limit_s: float) -> QueueStats:
    """The counts of the queue at `address`. `name`: of who asks, for people.

    Raises:
        UserError: it cannot be reached from this machine.
        PeerLost: no answer within `limit_s`.
        WireError: the queue has another token.
    """
    return expect(_ask(address, Stats(), name, limit_s), Counted).stats


def greet(address: QueueAddress, *, name: str, limit_s: float) -> Welcome:
    """The units, columns and tasks of the queue at `address`; otherwise as `look`."""
    return expect(_ask(address, Look(), name, limit_s), Welcome)


def _ask(address: QueueAddress, question: Request, name: str, limit_s: float) -> Reply:
    def asking() -> Operation[Reply]:
        [reply] = yield Step([Call(address.endpoint, question)])
        return reply

    with SyncClient(name, address.token, patience=Patience(limit_s=limit_s, retry_s=limit_s / 4)) as client:
        return client.run(asking())
