"""The transfer queue inside one process: the asyncio shell around the control plane and the data plane.

    put ──▶ gate ──version──▶ line of producers ──room──▶ rows, cells ──▶ policies ──▶ lines of consumers ──▶ claim
              ▲                      ▲                                                        ▲
           advance     an ack that retires rows frees room     put, ack, nack and expiry make rows ready

Waiting: a line is first come, first served. Only its head is woken, and acts in its own task. So a caller that is
cancelled or times out has changed nothing, and small requests never overtake a big one for ever. Every task has a line.
Where its policy splits batches among ranks, every rank has a line: a rank that is ahead must not stand before the ranks
that it waits for. Rows for a later weight version wait at the gate and join the line only after it opens, so no caller
waits behind them. Acks never wait for room, although their outputs count: otherwise a full queue could not empty.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from tailrace.config.columns import COLUMNS, ColumnKind
from tailrace.config.transfer import LocalQueueConfig
from tailrace.errors import QueueClosed, QueueTimeout
from tailrace.transfer.queue.base import Claim, NewRow, QueueStats, Row, RowId, TaskStats, TransferQueue
from tailrace.transfer.queue.local.data_plane import Cells, DataPlane
from tailrace.transfer.queue.local.lines import AsyncLine, VersionGate
from tailrace.transfer.queue.rows.control_plane import ControlPlane
from tailrace.transfer.queue.rows.schema import Schema, check_capacity, check_limit, late_claim, late_put
from tailrace.transfer.queue.rows.state import Lease, RowHeader
from tailrace.transfer.queue.rows.table import QueueTask, check_table
from tailrace.transfer.queue.snapshot import decode_snapshot, encode_snapshot
from tailrace.types import Value, WeightVersion


class LocalQueue(TransferQueue):
    """A transfer queue in memory, for one event loop. See `TransferQueue` for the contract."""

    def __init__(
        self,
        tasks: Sequence[QueueTask],
        config: LocalQueueConfig,
        *,
        columns: Mapping[str, ColumnKind] = COLUMNS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: returns seconds that never go back; it measures leases and waits.

        Raises:
            QueueError: rows cannot pass through the table, see `check_table`.
        """
        check_table(tasks, columns)
        self._reads = {task.spec.name: task.spec.reads for task in tasks}
        self._columns = dict(columns)
        self._schema = Schema([task.spec for task in tasks])
        self._config = config
        self._clock = clock
        self._control = ControlPlane(tasks, lease_s=config.lease_s)
        self._data = DataPlane(columns)
        self._gate = VersionGate()
        self._producers = AsyncLine()
        self._consumers = {task.spec.name: {rank: AsyncLine() for rank in task.policy.ranks} for task in tasks}
        """The lines of consumers, by task and rank."""
        self._losses = AsyncLine()
        self._put_wait_s = 0.0
        self._claim_wait_s = dict.fromkeys(self._reads, 0.0)
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def put(self, rows: Sequence[NewRow], *, timeout: float | None = None) -> list[RowId]:
        """See `TransferQueue.put`. Each row brings every column that some task reads and none writes."""
        if not rows:
            return []
        self._schema.check_new(rows)
        headers = list(map(RowHeader.of, rows))
        self._control.check_groups(headers)
        cells = [self._data.freeze(row.cells) for row in rows]
        check_capacity(len(cells), sum(cell.nbytes for cell in cells), self._config)
        not_before = max(row.not_before for row in rows)
        limit = self._limit(timeout)
        start = self._clock()
        try:
            async with asyncio.timeout(limit):
                if not_before > self._control.version and not self._closed:
                    await self._gate.wait(not_before)
                if self._control.is_lost(headers):  # their room was theirs before, and others may wait for them
                    ids = self._put(headers, cells)
                else:
                    ids = await self._producers.wait(lambda: self._try_put(headers, cells))
        except TimeoutError:
            raise late_put(len(rows), limit, self._obstacle(not_before)) from None
        self._put_wait_s += self._clock() - start
        self._call_consumers()
        return ids

    async def claim(
        self, task: str, *, limit: int | None = None, rank: int | None = None, timeout: float | None = None
    ) -> Claim:
        """See `TransferQueue.claim`. Consumers of one task and rank are served in the order in which they came."""
        self._expire()
        self._control.check_claim(task, rank)
        check_limit(limit)
        seconds = self._limit(timeout)
        start = self._clock()
        try:
            async with asyncio.timeout(seconds):
                lease = await self._consumers[task][rank].wait(lambda: self._try_claim(task, limit, rank))
        except TimeoutError:
            raise late_claim(task, rank, seconds, self._control.stats()[task]) from None
        self._claim_wait_s[task] += self._clock() - start
        return Claim(lease_id=lease.id, lease_s=self._config.lease_s, task=task, rows=self._read(lease))

    async def ack(self, claim: Claim, outputs: Mapping[RowId, Mapping[str, Value]]) -> None:
        """See `TransferQueue.ack`."""
        self._expire()
        cells = {row: self._data.freeze(output) for row, output in outputs.items()}
        retired = self._control.ack(claim.lease_id, cells)
        for row, output in cells.items():
            self._data.write(row, output)
        for row in retired:
            self._data.drop(row)
        if retired:
            self._producers.call()
        self._call_consumers()

    async def nack(self, claim: Claim, rows: Sequence[RowId] | None = None) -> None:
        """See `TransferQueue.nack`."""
        self._expire()
        self._control.nack(claim.lease_id, rows)
        self._call_consumers()

    async def renew(self, claim: Claim) -> None:
        """See `TransferQueue.renew`."""
        self._expire()
        self._control.renew(claim.lease_id, self._clock())

    async def advance(self, version: WeightVersion) -> None:
        """See `TransferQueue.advance`."""
        self._control.advance(version)
        self._gate.open(self._control.version)

    async def remake(self, claim: Claim, groups: Collection[int], *, most: int) -> list[int]:
        """See `TransferQueue.remake`."""
        self._expire()
        loss = self._control.remake(claim.lease_id, groups, most)
        for row in loss.rows:
            self._data.drop(row)
        self._losses.call()
        self._producers.call()
        return loss.groups

    async def lost_groups(self, *, timeout: float | None = None) -> dict[int, int]:
        """See `TransferQueue.lost_groups`. No unit can die here."""
        limit = self._limit(timeout)
        try:
            async with asyncio.timeout(limit):
                return await self._losses.wait(lambda: self._control.lost_groups or None)
        except TimeoutError:
            raise QueueTimeout(f"in {limit:g} s no group was lost") from None

    async def stats(self) -> QueueStats:
        """See `TransferQueue.stats`."""
        return QueueStats(
            rows=len(self._control),
            bytes=self._data.nbytes,
            blocked_puts=len(self._gate) + len(self._producers),
            blocked_by=self._blocked_by(),
            put_wait_s=self._put_wait_s,
            version=self._control.version,
            lost_groups=len(self._control.lost_groups),
            closed=self._closed,
            tasks={task: self._with_waits(task, counts) for task, counts in self._control.stats().items()},
        )

    async def snapshot(self) -> bytes:
        """See `TransferQueue.snapshot`."""
        state = self._control.export()
        parts = {row.id: self._data.stored(row.id) for row in state.rows}
        return encode_snapshot(self._schema.tasks, self._columns, state, parts)

    async def restore(self, snapshot: bytes) -> None:
        """See `TransferQueue.restore`; empty means that the queue has never held a row. Rows become ready by `order`.

        Row ids stay valid: an id from before the snapshot names the same row or none.
        """
        state, parts = decode_snapshot(snapshot, self._schema.tasks, self._columns)
        self._control.restore(state)
        for row in state.rows:
            self._data.store(row.id, parts[row.id], row.facts)
        self._gate.open(self._control.version)
        self._losses.call()
        self._call_consumers()

    async def close(self) -> None:
        """See `TransferQueue.close`."""
        self._closed = True
        consumers = [line for lines in self._consumers.values() for line in lines.values()]
        for line in (self._producers, self._losses, *consumers):
            line.close()
        self._gate.open(None)  # the line behind the gate sends the callers away
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _limit(self, timeout: float | None) -> float:
        return self._config.timeout_s if timeout is None else timeout

    def _try_put(self, rows: Sequence[RowHeader], cells: Sequence[Cells]) -> list[RowId] | None:
        total = self._data.nbytes + sum(cell.nbytes for cell in cells)
        if len(self._control) + len(rows) > self._config.max_rows or total > self._config.max_bytes:
            return None
        return self._put(rows, cells)

    def _put(self, rows: Sequence[RowHeader], cells: Sequence[Cells]) -> list[RowId]:
        if self._closed:
            raise QueueClosed("the queue was closed")
        ids = self._control.put(rows, cells)
        for row_id, cell in zip(ids, cells, strict=True):
            if self._control.is_stored(row_id):
                self._data.write(row_id, cell)
        return ids

    def _try_claim(self, task: str, limit: int | None, rank: int | None) -> Lease | None:
        lease = self._control.claim(task, limit=limit, rank=rank, now=self._clock())
        if lease is not None:
            self._set_timer()
            self._call_ranks(task)  # other ranks may have waited for this one to take its part
        return lease

    def _read(self, lease: Lease) -> tuple[Row, ...]:
        columns = self._reads[lease.task]
        return tuple(
            Row(id=row.id, group_id=row.group_id, order=row.order, cells=self._data.read(row.id, columns))
            for row in lease.rows.values()
        )

    def _call_consumers(self) -> None:
        for task in self._control.ready_tasks:
            self._call_ranks(task)

    def _call_ranks(self, task: str) -> None:
        for line in self._consumers[task].values():
            line.call()

    def _expire(self) -> None:
        if self._control.expire(self._clock()):
            self._call_consumers()

    def _set_timer(self) -> None:
        """Set the timer for the earliest lease. If it fires for a lease that is gone, it is set for the next one."""
        deadline = self._control.next_deadline
        if self._timer is None and deadline is not None and not self._closed:
            delay = max(0.0, deadline - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._expire()
        self._set_timer()

    def _with_waits(self, task: str, counts: TaskStats) -> TaskStats:
        waiting = sum(len(line) for line in self._consumers[task].values())
        return replace(counts, claims=waiting, wait_s=self._claim_wait_s[task])

    def _blocked_by(self) -> str | None:
        """The reason why the next producer in line waits; None where none waits."""
        if len(self._producers):
            return self._obstacle(self._control.version)
        return self._obstacle(self._gate.first) if len(self._gate) else None

    def _obstacle(self, not_before: WeightVersion) -> str:
        """The reason why a put of rows for version `not_before` waits."""
        if not_before > self._control.version:
            return f"weight version {self._control.version}; its rows are for {not_before}"
        rows, nbytes = len(self._control), self._data.nbytes
        return f"{rows} of {self._config.max_rows} rows and {nbytes} of {self._config.max_bytes} bytes are taken"
