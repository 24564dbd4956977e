"""Consumers at a controller. Claims wait in lines, one for each task and rank. An ack, a nack or time ends a lease."""

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
    Later,
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
    """A consumer that waits for rows."""

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
    """Hands out rows under leases, and handles acks, nacks, renewals and expiries."""

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
        """The record of each lease that may be live, by lease id: its client, and the rows that it held at first."""
        self._closed = False
        self.wait_s = dict.fromkeys(self._specs, 0.0)
        """Seconds that answered claims have waited in all, by task."""

    # Requests

    def claim(self, incoming: Incoming) -> None:
        """Handle Claim: a consumer wants rows.

        Raises:
            QueueError: there is no such task or rank.
        """
        message: Claim = incoming.message
        if self._closed:
            raise QueueClosed("the queue was closed")
        self._context.control.check_claim(message.task, message.rank)
        check_limit(message.limit)
        self._lines[message.task][message.rank].join(_Claim(self, incoming.ticket, message))
        self._serve(message.task)

    def ack(self, incoming: Incoming) -> bool:
        """Handle Ack: rows are consumed, and their outputs are written. Return whether rows have left.

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
            context.copies.note(missing)
        context.copies.lease_ended(facts)
        self._forget_if_over(message.lease_id)
        self.serve()
        return bool(retired)

    def nack(self, incoming: Incoming) -> Reply:
        """Handle Nack: a consumer gives rows back.

        Raises:
            LeaseError, StaleRowError: see `ControlPlane.nack`.
        """
        message: Nack = incoming.message
        self.give_back(message.lease_id, None if message.rows is None else row_ids(message.rows))
        return Reply(Accepted())

    def renew(self, incoming: Incoming) -> Reply:
        """Handle Renew: a consumer is still at work.

        Raises:
            LeaseError, StaleRowError: see `ControlPlane.renew`.
        """
        message: Renew = incoming.message
        self._context.control.renew(message.lease_id, self._context.server.now, row_ids(message.rows))
        return Reply(Accepted())

    # Events

    def serve(self) -> None:
        """Serve the waiting claims; called when rows may have become ready."""
        for task in self._context.control.ready_tasks:
            self._serve(task)

    def give_back(self, lease_id: int, rows: Sequence[RowId] | None) -> None:
        """Make rows of a lease ready again: `rows`, or with None all that it still holds, which may be none."""
        self._ended([Ended(lease_id, self._context.control.nack(lease_id, rows))], expired=False)

    def expire(self) -> None:
        """End the leases whose time is over."""
        self._ended(self._context.control.expire(self._context.server.now), expired=True)

    def lose_client(self, client: str) -> None:
        """End the leases and claims of a client that has died."""
        self.forget(lambda ticket: ticket.client == client)
        held = [number for number, lease in self._holders.items() if lease.client == client]
        self._ended(list(map(self._context.control.end, held)), expired=True)

    def forget(self, gone: Callable[[Ticket], bool]) -> None:
        """Drop the claims whose client no longer waits for the answer; `gone` tells by ticket."""
        for task, lines in self._lines.items():
            if any([line.forget(gone) for line in lines.values()]):
                self._serve(task)

    def close(self) -> None:
        """Answer all waiting and later claims with QueueClosed."""
        self._closed = True
        for lines in self._lines.values():
            for line in lines.values():
                line.send_away(lambda: QueueClosed("the queue was closed"))

    def restore(self, state: ControlState, leases: Sequence[log.RowsLeased]) -> dict[Ticket, Answer]:
        """Take over the state from before the controller restarted, with the leases that go on.

        Return the answers to the claims of these leases, by ticket, whether they were sent before the restart or not.
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
        """Drop the records of leases that hold no rows any more; called after rows were lost."""
        for lease_id in list(self._holders):
            self._forget_if_over(lease_id)

    def leases(self) -> list[log.RowsLeased]:
        """The records of the live leases, for a journal that is replaced."""
        return [
            log.RowsLeased(lease.client, lease.number, number, lease.task, pack(rows))
            for number, lease in self._holders.items()
            if (rows := self._context.control.leased(number))
        ]

    def is_live(self, lease_id: int) -> bool:
        """Whether a lease still holds rows, so that outputs may be written under it."""
        return bool(self._context.control.leased(lease_id))

    def stats(self) -> Mapping[str, TaskStats]:
        """The counts of each task."""
        counts = self._context.control.stats()
        for name, lines in self._lines.items():
            waiting = sum(map(len, lines.values()))
            counts[name] = replace(counts[name], claims=waiting, wait_s=self.wait_s[name])
        return counts

    def lease_now(self, ticket: Ticket, message: Claim) -> Claimed | Later | Wait:
        """Lease rows and return the answer, or Wait where there are none. Later: see there.

        Raises:
            QueueError: see `ControlPlane.claim`.
        """
        context = self._context
        if context.units.recovering:
            return Wait.HERE
        now = context.server.now
        if message.window is not None:
            window = context.control.next_window(message.task)
            if window is None and message.wait_s:
                return Wait.HERE
            if window is None or window > message.window:
                return Later(window)
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
            pass  # try again: a rank may have waited for another rank to take its part

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
            control.window_of(lease.task, next(iter(lease.rows.values())).order),
        )

    def _ended(self, leases: Sequence[Ended], *, expired: bool) -> None:
        """Record that rows of these leases are ready again. What was written under the leases will not be read.

        All of it is in the journal before any of these rows is handed out.
        """
        for ended in leases:
            if ended.rows:
                self._context.journal.append(log.RowsReturned(ended.lease, pack(ended.rows), expired))
                self._settle(ended)
                self._context.copies.lease_ended(ended.rows)
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
    """The units of a row, rotated by `lease_id` so that replicas share the reads, and filled up to `width`."""
    first = lease_id % len(units)
    return [*units[first:], *units[:first], *[NO_UNIT] * (width - len(units))]
