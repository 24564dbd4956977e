"""The operations of a client on a queue of one controller."""

from collections.abc import Collection, Mapping, Sequence

from tailrace.transfer.queue.base import Claim, NewRow, QueueStats, RowId
from tailrace.transfer.queue.client import control, snapshots
from tailrace.transfer.queue.client.ack import ack_rows, nack_rows, remake_groups, renew_lease
from tailrace.transfer.queue.client.claim import claim_rows, fetch_rows, lease_rows
from tailrace.transfer.queue.client.operations import Operations
from tailrace.transfer.queue.client.put import put_rows
from tailrace.transfer.queue.client.session import Session
from tailrace.transfer.queue.messages import Claimed
from tailrace.transfer.wire.calls import Call, Operation
from tailrace.types import Value, WeightVersion


class OneController(Operations):
    """The operations of a client with one controller, which share a session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def prepared(self) -> Operation[Session]:
        """See `Operations.prepared`."""
        yield from self._session.prepare()
        return self._session

    def put(self, rows: Sequence[NewRow], *, timeout: float) -> Operation[list[RowId]]:
        """See `Operations.put`."""
        return put_rows(self._session, rows, timeout=timeout)

    def claim(self, task: str, *, limit: int | None, rank: int | None, timeout: float) -> Operation[Claim]:
        """See `Operations.claim`."""
        return claim_rows(self._session, task, limit=limit, rank=rank, timeout=timeout)

    def lease(self, task: str, *, limit: int | None, rank: int | None, timeout: float) -> Operation[Claimed]:
        """See `Operations.lease`."""
        return lease_rows(self._session, task, limit=limit, rank=rank, timeout=timeout)

    def fetch(self, task: str, claimed: Claimed) -> Operation[Claim]:
        """See `Operations.fetch`."""
        return fetch_rows(self._session, task, claimed)

    def ack(self, claim: Claim, outputs: Mapping[RowId, Mapping[str, Value]], *, timeout: float) -> Operation[None]:
        """See `Operations.ack`."""
        return ack_rows(self._session, claim, outputs, timeout=timeout)

    def nack(self, claim: Claim, rows: Sequence[RowId] | None) -> Operation[None]:
        """See `Operations.nack`."""
        return nack_rows(self._session, claim, rows)

    def renew(self, claim: Claim) -> Operation[None]:
        """See `Operations.renew`."""
        return renew_lease(self._session, claim.lease_id)

    def remake(self, claim: Claim, groups: Collection[int], most: int) -> Operation[list[int]]:
        """See `Operations.remake`."""
        return remake_groups(self._session, claim, groups, most)

    def advance(self, version: WeightVersion) -> Operation[None]:
        """See `Operations.advance`."""
        return control.advance(self._session, version)

    def dismiss(self, name: str) -> Operation[None]:
        """See `Operations.dismiss`."""
        return control.dismiss(self._session, name)

    def lost_groups(self, *, timeout: float) -> Operation[dict[int, int]]:
        """See `Operations.lost_groups`."""
        return control.lost_groups(self._session, timeout=timeout)

    def stats(self) -> Operation[QueueStats]:
        """See `Operations.stats`."""
        return control.stats(self._session)

    def snapshot(self, *, timeout: float) -> Operation[bytes]:
        """See `Operations.snapshot`."""
        return snapshots.snapshot(self._session, timeout=timeout)

    def restore(self, snapshot: bytes) -> Operation[None]:
        """See `Operations.restore`."""
        return snapshots.restore(self._session, snapshot)

    def close(self) -> Operation[None]:
        """See `Operations.close`."""
        return control.close(self._session)

    def due(self) -> list[Call]:
        """See `Operations.due`."""
        return self._session.due()

    def signs_of_life(self, limit_s: float) -> list[Call]:
        """See `Operations.signs_of_life`."""
        return self._session.signs_of_life(limit_s)

    def release(self) -> None:
        """See `Operations.release`."""
        self._session.memory.close()
