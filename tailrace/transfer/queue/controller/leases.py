"""Consumers at a controller: claims wait in lines, one for each task and rank; leases end by acks, nacks or time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from tailrace.errors import QueueClosed, QueueError
from tailrace.transfer.queue.base import RowId, TaskStats
from tailrace.transfer.queue.controller import journal as log
from tailrace.transfer.queue.controller.context import Context
from tailrace.transfer.queue.controller.requests import acked_facts, part_bytes
from tailrace.transfer.queue.controller.waiting import Wait, Waiter, WaitLine
from tailrace.transfer.queue.messages import (
    NO_UNIT,
    Ack,
    Answer,
    Claim,
    Claimed,
    Nack,
    Renew,
    pack,
    row_ids,
)
from tailrace.transfer.queue.rows.schema import check_limit, late_claim
from tailrace.transfer.queue.rows.state import ControlState, Ended, Lease, LeaseRecord
from tailrace.transfer.queue.rows.table import QueueTask
from tailrace.transfer.queue.storage.base import PartId
from tailrace.transfer.wire.frames import Reply
from tailrace.transfer.wire.messages import Accepted
from tailrace.transfer.wire.server import Incoming, Ticket


class _Claim(Waiter):
    """A consumer that wants rows."""

    def __init__(self, leases: "Leases", ticket: Ticket, message: Claim) -> None:
        super().__init__(ticket, message.wait_s)
        self._leases = leases
        self.message = message

    def attempt(self) -> Answer | Wait:
        """See `Waiter.attempt`."""
        return self._leases.lease_now(self.ticket, self.message)

    def late(self) -> QueueError:
        """See `Waiter.late`."""
        task = self.message.task
        return late_claim(task, self.message.rank, self.limit_s, self._leases.stats()[task])

    def count_wait(self, seconds: float) -> None:
        """See `Waiter.count_wait`."""
        self._leases.wait_s[self.message.task] += seconds


class Leases:
    """Hands out rows and takes back what became of them."""

    def __init__(self, context: Context, tasks: Sequence[QueueTask]) -> None:
        self._context = context
        self._specs = {task.spec.name: task.spec for task in tasks}
        self._lines: dict[str, dict[int | None, WaitLine[_Claim]]] = {
            task.spec.name: {
                rank: WaitLine(context.server, context.timers, partial(self._serve, task.spec.name))
                for rank in task.policy.ranks
            }
            for task in tasks
        }
        self._holders: dict[int, log.RowsLeased] = {}
        """Of each lease that may be live: to whom it went, and which rows at first."""
        self._closed = False
        self.wait_s = dict.fromkeys(self._specs, 0.0)
        """By task, seconds that claims which have been answered had to wait, in all."""

    # Requests

    def claim(self, incoming: Incoming) -> None:
        """A consumer wants rows.

        Raises:
            QueueError: no such task or rank.
        """
        message: Claim = incoming.message
        if self._closed:
            raise QueueClosed("the queue was closed")
        self._context.control.check_claim(message.task, message.rank)
        check_limit(message.limit)
        self._lines[message.task][message.rank].join(_Claim(self, incoming.ticket, message))
        self._serve(message.task)

    def ack(self, incoming: Incoming) -> bool:
        """Rows were worked on, and their outputs written. Whether rows have left.

        Raises:
            LeaseError, StaleRowError, ColumnError: see `ControlPlane.ack`.
        """
        message: Ack = incoming.message
        context = self._context
        control, accounts = context.control, context.accounts
        facts = acked_facts(message)
        sizes = part_bytes(context.codec, message.runs)
        units = {row: control.units(row) for row in facts}
        retired = control.ack(message.lease_id, facts, missed=message.missed)
        context.journal.append(log.RowsAcked(*incoming.ticket, message))
        for row, nbytes in zip(facts, sizes, strict=False):  # a task without outputs sends no runs
            accounts.grow(row, nbytes, units[row])
        accounts.leave({row: units[row] for row in retired})
        for number in message.missed:
            missing = [row for row, own in units.items() if number in own and control.is_stored(row)]
            accounts.forsake(missing, number)
        self._forget_if_over(message.lease_id)
        self.serve()
        return bool(retired)

    def nack(self, incoming: Incoming) -> Reply:
        """Rows come back.

        Raises:
            LeaseError, StaleRowError: see `ControlPlane.nack`.
        """
        message: Nack = incoming.message
        self.give_back(message.lease_id, None if message.rows is None else row_ids(message.rows))
        return Reply(Accepted())

    def renew(self, incoming: Incoming) -> Reply:
        """A consumer is still at work.

        Raises:
            LeaseError: see `ControlPlane.renew`.
        """
        message: Renew = incoming.message
        self._context.control.renew(message.lease_id, self._context.server.now)
        return Reply(Accepted())

    # Events

    def serve(self) -> None:
        """Rows may have become ready."""
        for task in self._context.control.ready_tasks:
            self._serve(task)

    def give_back(self, lease_id: int, rows: Sequence[RowId] | None) -> None:
        """A consumer does not want (some) rows of its lease any more, if it has some."""
        self._ended([Ended(lease_id, self._context.control.nack(lease_id, rows))], expired=False)

    def expire(self) -> None:
        """Leases whose time is over end."""
        self._ended(self._context.control.expire(self._context.server.now), expired=True)

    def lose_client(self, client: str) -> None:
        """A consumer died."""
        self.forget(lambda ticket: ticket.client == client)
        held = [number for number, lease in self._holders.items() if lease.client == client]
        self._ended(list(map(self._context.control.end, held)), expired=True)

    def forget(self, gone: Callable[[Ticket], bool]) -> None:
        """Nobody waits for these answers any more."""
        for task, lines in self._lines.items():
            if any([line.forget(gone) for line in lines.values()]):
                self._serve(task)

    def close(self) -> None:
        """Send all consumers away, now and later."""
        self._closed = True
        for lines in self._lines.values():
            for line in lines.values():
                line.send_away(lambda: QueueClosed("the queue was closed"))

    def restore(self, state: ControlState, leases: Sequence[log.RowsLeased]) -> dict[Ticket, Answer]:
        """The state of before the controller was started anew, with the leases that go on.

        Returns what the claims were answered, or would have been, that these leases went to.
        """
        context = self._context
        records = [LeaseRecord(lease.lease_id, lease.task, row_ids(lease.rows)) for lease in leases]
        live = context.control.restore(state, leases=records, now=context.server.now)
        self._holders = {lease.lease_id: lease for lease in leases}
        return {
            Ticket(holder.client, holder.number): self._claimed(lease)
            for holder, lease in zip(leases, live, strict=True)
        }

    def forget_over(self) -> None:
        """Rows were lost: leases that held no others are over."""
        for lease_id in list(self._holders):
            self._forget_if_over(lease_id)

    def leases(self) -> list[log.RowsLeased]:
        """Those that are live, for a journal that begins anew."""
        return [
            log.RowsLeased(lease.client, lease.number, number, lease.task, pack(rows))
            for number, lease in self._holders.items()
            if (rows := self._context.control.leased(number))
        ]

    def is_live(self, lease_id: int) -> bool:
        """Whether something may still be written under a lease."""
        return bool(self._context.control.leased(lease_id))

    def stats(self) -> Mapping[str, TaskStats]:
        """Counts by task."""
        counts = self._context.control.stats()
        for name, lines in self._lines.items():
            waiting = sum(map(len, lines.values()))
            counts[name] = replace(counts[name], claims=waiting, wait_s=self.wait_s[name])
        return counts

    def lease_now(self, ticket: Ticket, message: Claim) -> Claimed | Wait:
        """Lease rows, if there are some.

        Raises:
            QueueError: see `ControlPlane.claim`.
        """
        context = self._context
        if context.units.recovering:
            return Wait.HERE
        now = context.server.now
        lease = context.control.claim(message.task, limit=message.limit, rank=message.rank, now=now)
        if lease is None:
            return Wait.HERE
        record = log.RowsLeased(*ticket, lease.id, lease.task, pack(lease.rows))
        context.journal.append(record)
        self._holders[lease.id] = record
        return self._claimed(lease)

    def _serve(self, task: str) -> None:
        lines = list(self._lines[task].values())
        while any([line.serve()[0] for line in lines]) and len(lines) > 1:
            pass  # a rank may have waited for another to take its part

    def _claimed(self, lease: Lease) -> Claimed:
        control = self._context.control
        rows = np.array([(*row.id, row.group_id, row.order) for row in lease.rows.values()], dtype=np.int64)
        units = [control.units(row) for row in lease.rows]
        width = max(map(len, units))
        spec = self._specs[lease.task]
        tags = np.array([control.tags(lease.task, row) for row in lease.rows], dtype=np.int64)
        cells = None if tags.any() else self._context.cells.read(list(lease.rows), spec.reads)
        return Claimed(
            lease.id,
            self._context.config.lease_s,
            pack(rows),
            pack(np.array([_spread(number, lease.id, width) for number in units], dtype=np.int64)),
            width,
            list(spec.reads),
            pack(tags),
            cells,
        )

    def _ended(self, leases: Sequence[Ended], *, expired: bool) -> None:
        """Rows of leases are ready again; what was written under them will not be read.

        The journal has it of all of them before anybody is handed a row of one.
        """
        for ended in leases:
            if ended.rows:
                self._context.journal.append(log.RowsReturned(ended.lease, pack(ended.rows), expired))
                self._settle(ended)
            self._forget_if_over(ended.lease)
        if any(ended.rows for ended in leases):
            self.serve()

    def _settle(self, ended: Ended) -> None:
        if self._specs[self._holders[ended.lease].task].writes:
            for row in ended.rows:
                self._context.units.settle(self._context.control.units(row), parts=[PartId(*row, ended.lease)])

    def _forget_if_over(self, lease_id: int) -> None:
        if not self.is_live(lease_id):
            self._holders.pop(lease_id, None)


def _spread(units: tuple[int, ...], lease_id: int, width: int) -> list[int]:
    """The units of a row, another one first for every lease, so that replicas share the reading."""
    first = lease_id % len(units)
    return [*units[first:], *units[:first], *[NO_UNIT] * (width - len(units))]
