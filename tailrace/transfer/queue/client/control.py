"""Operations on the queue as a whole: each is one call to the controller."""

from tailrace.transfer.queue.base import QueueStats
from tailrace.transfer.queue.client.session import Session
from tailrace.transfer.queue.messages import Advance, Close, Counted, Dismiss, Groups, Lost, Stats, unpack
from tailrace.transfer.wire.calls import Call, Operation, ask
from tailrace.types import WeightVersion


def advance(session: Session, version: WeightVersion) -> Operation[None]:
    """See `TransferQueue.advance`."""
    yield from session.tell(Advance(version))


def dismiss(session: Session, name: str) -> Operation[None]:
    """See `RemoteQueue.dismiss`."""
    yield from session.tell(Dismiss(name))


def lost_groups(session: Session, *, timeout: float) -> Operation[dict[int, int]]:
    """See `TransferQueue.lost_groups`."""
    groups = yield from ask(Call(session.controller, Lost(timeout), wait_s=timeout), Groups)
    return {number: remade for number, remade in unpack(groups.ids, 2).tolist()}


def stats(session: Session) -> Operation[QueueStats]:
    """See `TransferQueue.stats`."""
    return (yield from ask(Call(session.controller, Stats()), Counted)).stats


def close(session: Session) -> Operation[None]:
    """See `TransferQueue.close`."""
    yield from session.tell(Close())
