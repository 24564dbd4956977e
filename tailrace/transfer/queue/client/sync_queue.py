"""The client of a queue in separate processes, for a program without an event loop.

Waiting: see `RemoteQueue`. Between calls this client gives no sign of life, so its death is not noticed: its rows go
back when their leases expire. Use `held` for a claim that takes long.

Arrays that lie in the memory of a unit are valid while the connection to it stands. The connection breaks, for example,
when the process is stopped for longer than 30 s. Then the arrays may be overwritten or gone an hour after the last
message: copy what you keep longer, or pass `shared_memory=False`. If this client is killed, the memory that it was
reading or writing stays taken for that hour.
"""

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self, TypeVar

from tailrace.config.columns import ColumnKind
from tailrace.errors import LeaseError, PeerLost, TailraceError
from tailrace.transfer.queue.base import Claim, NewRow, QueueStats, RowId
from tailrace.transfer.queue.client import checks
from tailrace.transfer.queue.client.base import QueueClient, operations_of
from tailrace.transfer.queue.messages import Claimed
from tailrace.transfer.queue.rows.schema import check_integer
from tailrace.transfer.wire.calls import Operation
from tailrace.transfer.wire.sync import SyncClient
from tailrace.types import Value, WeightVersion

T = TypeVar("T")


class SyncQueue(QueueClient[SyncClient]):
    """`with SyncQueue(address, name="scorer") as queue: ...`, for one thread.

    It has the methods of `RemoteQueue` and `TransferQueue`, which block here. It belongs to the process that made it; a
    forked process makes its own.
    """

    _kind = SyncClient

    def __enter__(self) -> Self:
        """Return the client. It connects when a call needs it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Hang up. In a forked process this does nothing: the connections belong to the client's process."""
        if not self._owner.is_here:
            return
        self._client.tell(self._operations.due())
        self._client.close()
        self._operations.release()

    def reads(self, task: str) -> tuple[str, ...]:
        """Return the columns that `task` reads.

        Raises:
            QueueError: the queue has no such task.
        """
        return self._run(self._operations.prepared()).schema.task(task).reads

    @property
    def columns(self) -> Mapping[str, ColumnKind]:
        """The kind of each of the queue's columns."""
        return self._run(self._operations.prepared()).columns

    def put(self, rows: Sequence[NewRow], *, timeout: float | None = None) -> list[RowId]:
        """See `RemoteQueue.put`."""
        checks.check_rows(rows)
        limit = self._limit(timeout)
        return self._run(self._operations.put(rows, timeout=limit), limit)

    def claim(
        self, task: str, *, limit: int | None = None, rank: int | None = None, timeout: float | None = None
    ) -> Claim:
        """See `TransferQueue.claim`."""
        checks.check_claim(task, limit, rank)
        wait_s = self._limit(timeout)
        return self._run(self._operations.claim(task, limit=limit, rank=rank, timeout=wait_s), wait_s)

    def fetch(self, task: str, claimed: Claimed) -> Claim:
        """Do the second half of `claim`: fetch the cells of rows that another client leased, see `RemoteQueue.lease`.

        Raises:
            PeerLost, StaleRowError: a row did not come from any of its units; the lease is not given back.
        """
        return self._run(self._operations.fetch(task, claimed))

    def ack(self, claim: Claim, outputs: Mapping[RowId, Mapping[str, Value]]) -> None:
        """See `RemoteQueue.ack`."""
        checks.check_output_rows(outputs)
        self._run(self._operations.ack(claim, outputs, timeout=self._timeout_s), self._timeout_s)

    def nack(self, claim: Claim, rows: Sequence[RowId] | None = None) -> None:
        """See `TransferQueue.nack`."""
        checks.check_row_ids(rows or ())
        self._run(self._operations.nack(claim, rows))

    def renew(self, claim: Claim) -> None:
        """See `TransferQueue.renew`."""
        self._run(self._operations.renew(claim))

    def remake(self, claim: Claim, groups: Collection[int], *, most: int) -> list[int]:
        """See `TransferQueue.remake`."""
        checks.check_remake(groups, most)
        return self._run(self._operations.remake(claim, groups, most))

    def advance(self, version: WeightVersion) -> None:
        """See `TransferQueue.advance`."""
        check_integer("version", version)
        self._run(self._operations.advance(version))

    def lost_groups(self, *, timeout: float | None = None) -> dict[int, int]:
        """See `TransferQueue.lost_groups`."""
        return self._run(self._operations.lost_groups(timeout=self._limit(timeout)))

    def stats(self) -> QueueStats:
        """See `TransferQueue.stats`."""
        return self._run(self._operations.stats())

    def snapshot(self) -> bytes:
        """See `TransferQueue.snapshot`."""
        return self._run(self._operations.snapshot(timeout=self._limit_s))

    def restore(self, snapshot: bytes) -> None:
        """See `TransferQueue.restore`."""
        self._run(self._operations.restore(snapshot))

    def close(self) -> None:
        """See `RemoteQueue.close`."""
        self._run(self._operations.close())

    @contextmanager
    def held(self, claim: Claim) -> Iterator[Claim]:
        """Renew the lease of `claim` in a thread while the block runs. Rows that were not acked go back at its end.

        Raises:
            TailraceError: the lease could not be renewed, and the block has not raised an error.
        """
        ended, renewing = threading.Event(), Future[None]()
        thread = threading.Thread(
            target=self._renew, args=(claim, ended, renewing), daemon=True, name=f"lease {claim.lease_id}"
        )
        thread.start()
        try:
            yield claim
            if renewing.done():
                renewing.result()
        finally:
            ended.set()
            if self._owner.is_here:  # else this process was forked inside the block; the claim is its parent's
                with suppress(PeerLost):  # the queue, if it comes back, ends the lease by itself
                    self.nack(claim)
                thread.join(2 * self._limit_s)  # the thread may be waiting for an answer

    def _renew(self, claim: Claim, ended: threading.Event, renewing: "Future[None]") -> None:
        try:
            self._renew_until(claim, ended)
        except TailraceError as error:  # raised in the thread of the block, at its end
            renewing.set_exception(error)

    def _renew_until(self, claim: Claim, ended: threading.Event) -> None:
        with self._connect() as client:
            operations = operations_of(self._address, shared_memory=False)
            while not ended.wait(claim.lease_s / 3):
                try:
                    client.run(operations.renew(claim))
                except PeerLost:
                    continue  # the controller may be back in time; if not, the ack will say so
                except LeaseError:
                    return  # all rows were acked; or the lease expired all the same, and the ack will say so

    def _run(self, operation: Operation[T], timeout: float | None = None) -> T:
        """Carry out `operation`. `timeout`: see `QueueClient._within`."""
        return self._client.run(operation, within_s=self._within(timeout), beside=self._operations.due)
