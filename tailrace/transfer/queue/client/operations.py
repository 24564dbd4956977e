"""The operations of a client on its queue: `one.OneController` and `several.SeveralControllers` carry them out."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence

from tailrace.transfer.queue.base import Claim, NewRow, QueueStats, RowId
from tailrace.transfer.queue.client.session import Session
from tailrace.transfer.queue.messages import Claimed
from tailrace.transfer.wire.calls import Call, Operation
from tailrace.types import Value, WeightVersion


class Operations(ABC):
    """The operations, with the state that they share. `timeout`: seconds in all."""

    @abstractmethod
    def prepared(self) -> Operation[Session]:
        """Return a session that knows the queue's table."""

    @abstractmethod
    def put(self, rows: Sequence[NewRow], *, timeout: float) -> Operation[list[RowId]]:
        """See `TransferQueue.put`."""

    @abstractmethod
    def claim(self, task: str, *, limit: int | None, rank: int | None, timeout: float) -> Operation[Claim]:
        """See `TransferQueue.claim`."""

    @abstractmethod
    def lease(self, task: str, *, limit: int | None, rank: int | None, timeout: float) -> Operation[Claimed]:
        """See `RemoteQueue.lease`."""

    @abstractmethod
    def fetch(self, task: str, claimed: Claimed) -> Operation[Claim]:
        """See `SyncQueue.fetch`."""

    @abstractmethod
    def ack(self, claim: Claim, outputs: Mapping[RowId, Mapping[str, Value]], *, timeout: float) -> Operation[None]:
        """See `TransferQueue.ack`."""

    @abstractmethod
    def nack(self, claim: Claim, rows: Sequence[RowId] | None) -> Operation[None]:
        """See `TransferQueue.nack`."""

    @abstractmethod
    def renew(self, claim: Claim) -> Operation[None]:
        """See `TransferQueue.renew`."""

    @abstractmethod
    def remake(self, claim: Claim, groups: Collection[int], most: int) -> Operation[list[int]]:
        """See `TransferQueue.remake`."""

    @abstractmethod
    def advance(self, version: WeightVersion) -> Operation[None]:
        """See `TransferQueue.advance`."""

    @abstractmethod
    def dismiss(self, name: str) -> Operation[None]:
        """See `RemoteQueue.dismiss`."""

    @abstractmethod
    def lost_groups(self, *, timeout: float) -> Operation[dict[int, int]]:
        """See `TransferQueue.lost_groups`."""

    @abstractmethod
    def stats(self) -> Operation[QueueStats]:
        """See `TransferQueue.stats`."""

    @abstractmethod
    def snapshot(self, *, timeout: float) -> Operation[bytes]:
        """See `TransferQueue.snapshot`."""

    @abstractmethod
    def restore(self, snapshot: bytes) -> Operation[None]:
        """See `TransferQueue.restore`."""

    @abstractmethod
    def close(self) -> Operation[None]:
        """See `TransferQueue.close`."""

    @abstractmethod
    def due(self) -> list[Call]:
        """See `Session.due`."""

    @abstractmethod
    def signs_of_life(self, limit_s: float) -> list[Call]:
        """See `Session.signs_of_life`."""

    @abstractmethod
    def release(self) -> None:
        """Unmap the memory of units: the client has hung up."""
