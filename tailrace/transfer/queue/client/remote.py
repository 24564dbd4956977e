"""The client of a queue in separate processes, for a program with an event loop.

    RemoteQueue ──operations──▶ AsyncClient ──▶ controller, units
         └── every quarter of `limit_s`: a sign of life, and the release of memory that is no longer used

Waiting: a put or a claim waits on the controller up to its timeout. Every call waits up to `limit_s` on a server that
does not answer. A program that blocks its loop for longer than `limit_s` counts as dead, and its rows go back.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Self, TypeVar

from tailrace.transfer.queue import holding
from tailrace.transfer.queue.base import Claim, NewRow, QueueStats, RowId, TransferQueue
from tailrace.transfer.queue.client import checks
from tailrace.transfer.queue.client.base import QueueClient
from tailrace.transfer.queue.messages import Claimed
from tailrace.transfer.queue.rows.schema import check_integer
from tailrace.transfer.wire.aio import AsyncClient
from tailrace.transfer.wire.calls import Operation
from tailrace.types import Value, WeightVersion

T = TypeVar("T")


class RemoteQueue(QueueClient[AsyncClient], TransferQueue):
    """`async with RemoteQueue(address, name="rollout") as queue: ...`, for one event loop.

    Every method may also raise PeerLost: a process of the queue did not answer, and the request may or may not have
    taken effect. A claimed row is valid until the block is left: its arrays may lie in the memory of a storage unit. A
    client belongs to the process that made it; a forked process makes its own.
    """

    _kind = AsyncClient

    async def __aenter__(self) -> Self:
        """Begin to send signs of life to the queue."""
        self._life = asyncio.create_task(self._live())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Hang up: calls that wait raise QueueClosed, and rows that were not acked go back after `limit_s`.

        In a forked process this does nothing: the connections belong to the process that made the client.
        """
        if not self._owner.is_here:
            return
        self._life.cancel()
        try:
            await asyncio.wait([self._life])  # awaiting the task and suppressing its cancellation would suppress ours
            self._client.tell(self._operations.due())
        finally:  # a socket that is left open would keep the process from ending
            self._client.close()
            self._operations.release()

    async def put(self, rows: Sequence[NewRow], *, timeout: float | None = None) -> list[RowId]:
        """See `TransferQueue.put`. The arrays of `rows` must not be changed before it returns.

        Raises:
            StorageFull: the units had no room within `timeout`.
        """
        checks.check_rows(rows)
        limit = self._limit(timeout)
        return await self._run(self._operations.put(rows, timeout=limit), limit)

    async def claim(
        self, task: str, *, limit: int | None = None, rank: int | None = None, timeout: float | None = None
    ) -> Claim:
        """See `TransferQueue.claim`."""
        checks.check_claim(task, limit, rank)
        wait_s = self._limit(timeout)
        return await self._run(self._operations.claim(task, limit=limit, rank=rank, timeout=wait_s), wait_s)

    async def lease(
        self, task: str, *, limit: int | None = None, rank: int | None = None, timeout: float | None = None
    ) -> Claimed:
        """Do the first half of `claim`: lease rows to this client, without their cells.

        Another client may fetch the cells, see `SyncQueue.fetch`.
        """
        checks.check_claim(task, limit, rank)
        wait_s = self._limit(timeout)
        return await self._run(self._operations.lease(task, limit=limit, rank=rank, timeout=wait_s), wait_s)

    async def ack(self, claim: Claim, outputs: Mapping[RowId, Mapping[str, Value]]) -> None:
        """See `TransferQueue.ack`.

        Raises:
            StorageFull: the units had no room within the client's `timeout_s`.
        """
        checks.check_output_rows(outputs)
        await self._run(self._operations.ack(claim, outputs, timeout=self._timeout_s), self._timeout_s)

    async def nack(self, claim: Claim, rows: Sequence[RowId] | None = None) -> None:
        """See `TransferQueue.nack`."""
        checks.check_row_ids(rows or ())
        await self._run(self._operations.nack(claim, rows))

    def held(self, claim: Claim) -> AbstractAsyncContextManager[Claim]:
        """Renew the lease of `claim` while the block runs. Rows that were not acked go back at its end."""
        return holding.held(self, claim)

    async def renew(self, claim: Claim) -> None:
        """See `TransferQueue.renew`."""
        await self._run(self._operations.renew(claim))

    async def remake(self, claim: Claim, groups: Collection[int], *, most: int) -> list[int]:
        """See `TransferQueue.remake`."""
        checks.check_remake(groups, most)
        return await self._run(self._operations.remake(claim, groups, most))

    async def advance(self, version: WeightVersion) -> None:
        """See `TransferQueue.advance`."""
        check_integer("version", version)
        await self._run(self._operations.advance(version))

    async def dismiss(self, name: str) -> None:
        """Tell the queue that clients have ended: their rows go back now, and not after `limit_s`.

        `name`: the name that was given to these clients, at most 100 characters. No living client may have it.
        """
        await self._run(self._operations.dismiss(name))

    async def lost_groups(self, *, timeout: float | None = None) -> dict[int, int]:
        """See `TransferQueue.lost_groups`."""
        return await self._run(self._operations.lost_groups(timeout=self._limit(timeout)))

    async def stats(self) -> QueueStats:
        """See `TransferQueue.stats`."""
        return await self._run(self._operations.stats())

    async def snapshot(self) -> bytes:
        """See `TransferQueue.snapshot`."""
        return await self._run(self._operations.snapshot(timeout=self._limit_s))

    async def restore(self, snapshot: bytes) -> None:
        """See `TransferQueue.restore`."""
        await self._run(self._operations.restore(snapshot))

    async def close(self) -> None:
        """See `TransferQueue.close`. It closes the queue for all clients; to hang up this client, leave the block."""
        await self._run(self._operations.close())

    def hang_up(self) -> None:
        """Hang up after the queue's processes have ended: every call, waiting now or made later, raises QueueClosed."""
        self._client.close()

    async def _run(self, operation: Operation[T], timeout: float | None = None) -> T:
        """Carry out `operation`. `timeout`: see `QueueClient._within`."""
        return await self._client.run(operation, within_s=self._within(timeout), beside=self._operations.due)

    async def _live(self) -> None:
        while self._owner.is_here:
            self._client.tell([*self._operations.signs_of_life(self._limit_s), *self._operations.due()])
            await asyncio.sleep(self._limit_s / 4)
