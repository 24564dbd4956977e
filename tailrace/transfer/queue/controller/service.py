"""The controller of a queue across processes (AsyncFlow, section 3.3): one thread that knows the state of every row.

    producers ──Admit──▶ Puts: lines ──room, units──▶ admissions ──Written by units──▶ control plane, policies
    consumers ──Claim──▶ Leases: lines, one for each task and rank ◀──ready rows─────────────┘
              ──Ack────▶ control plane ──rows that left──▶ UnitAccounts: Settle to their units; room for the first put

The controller sees small cells only (`inline_cells`). Units store the cells, and clients write to and read from units.
Every decision is in the journal before anybody hears of it. So a restarted controller goes on from the same state,
leases included. It first waits for its units, since only they know which parts they have.

Waiting: a claim waits for ready rows; a put for room, a weight version or a unit; `lost_groups` for a loss. Each waits
in a line, up to its own limit. No other request waits. A client that promised signs of life and gives none loses its
leases and admissions.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from tailrace.config.columns import COLUMNS, ColumnKind
from tailrace.errors import PeerLost, QueueClosed, QueueError, QueueTimeout
from tailrace.transfer.queue.base import QueueStats, RowId
from tailrace.transfer.queue.cells import PartCodec
from tailrace.transfer.queue.controller import journal as log
from tailrace.transfer.queue.controller.context import Context
from tailrace.transfer.queue.controller.copies import Copies
from tailrace.transfer.queue.controller.inline_cells import InlineCells
from tailrace.transfer.queue.controller.journal import Base, Change, Journal
from tailrace.transfer.queue.controller.leases import Leases
from tailrace.transfer.queue.controller.puts import Puts
from tailrace.transfer.queue.controller.replay import Recovered, replay
from tailrace.transfer.queue.controller.units import KnownUnit, StoredParts, UnitAccounts, Units
from tailrace.transfer.queue.controller.waiting import Timer, Timers, Wait, Waiter, WaitLine
from tailrace.transfer.queue.messages import (
    Ack,
    Admit,
    Admitted,
    Advance,
    Answer,
    Claim,
    Claimed,
    Close,
    Counted,
    Dismiss,
    Export,
    Exported,
    Groups,
    Join,
    Joined,
    Lost,
    Nack,
    ReadTable,
    Release,
    Remake,
    Renew,
    Restore,
    Retire,
    Stats,
    Table,
    Withdraw,
    Written,
    pack,
    row_ids,
    unpack,
)
from tailrace.transfer.queue.rows.control_plane import ControlPlane
from tailrace.transfer.queue.rows.schema import put_columns
from tailrace.transfer.queue.rows.state import Loss
from tailrace.transfer.queue.rows.table import QueueTask, check_table
from tailrace.transfer.queue.storage.base import PartId
from tailrace.transfer.wire.frames import Reply
from tailrace.transfer.wire.messages import Accepted, Beat, Cancel, Message
from tailrace.transfer.wire.server import Handler, Incoming, Server, Service, Ticket

if TYPE_CHECKING:
    from tailrace.config.transfer import ServiceQueueConfig


class _LossWanted(Waiter):
    """A client that waits for lost groups."""

    def __init__(self, ticket: Ticket, wait_s: float, control: ControlPlane) -> None:
        super().__init__(ticket, wait_s)
        self._control = control

    def attempt(self) -> Groups | Wait:
        """See `Waiter.attempt`."""
        lost = self._control.lost_groups
        return _groups(lost) if lost else Wait.HERE

    def late(self) -> QueueError:
        """See `Waiter.late`."""
        return QueueTimeout(f"no group was lost within {self.limit_s:g} s")

    def count_wait(self, seconds: float) -> None:
        """Do nothing: no statistic counts these waits."""


class Controller(Service):
    """Serves the table `tasks` through `server`."""

    def __init__(
        self,
        server: Server,
        tasks: Sequence[QueueTask],
        config: "ServiceQueueConfig",
        *,
        columns: Mapping[str, ColumnKind] = COLUMNS,
        journal: Journal,
        controllers: int = 1,
    ) -> None:
        """`journal`: a new one, or one of the same table, from whose state this controller goes on.

        `controllers`: those of the queue, of which this is one.

        Raises:
            QueueError: rows cannot pass through the table, see `check_table`; or the journal is of another table.
        """
        check_table(tasks, columns)
        self._specs = [task.spec for task in tasks]
        self._split = {task.spec.name for task in tasks if None not in task.policy.ranks}
        """Tasks whose policy splits batches among ranks."""
        self._gathering = [task.spec.name for task in tasks if task.policy.gathers]
        self._columns = dict(columns)
        self._closed = False
        self._watches: dict[str, tuple[float, Timer]] = {}
        """By client that promised signs of life: its limit in seconds, and the timer that declares it dead."""
        control = ControlPlane(tasks, lease_s=config.lease_s, controllers=controllers)
        self._context = self._make_context(server, control, config, journal)
        self._leases = Leases(self._context, tasks)
        written = {column for task in tasks for column in task.spec.writes}
        self._losses = WaitLine[_LossWanted](server, self._context.timers, lambda: None)
        restored = self._losses.serve
        self._puts = Puts(self._context, self._leases, put_columns(self._specs), written, restored=restored)
        recovered = replay(journal.records(), tasks, controllers=controllers)
        if recovered is not None:
            self._recover(recovered)
        self._begin_journal()

    def _make_context(
        self, server: Server, control: ControlPlane, config: "ServiceQueueConfig", journal: Journal
    ) -> Context:
        timers = Timers()
        units = Units(server, timers, limit_s=config.unit_limit_s, journal=journal, control=control, observer=self)
        codec = PartCodec(self._columns)
        cells = InlineCells(codec)
        accounts = UnitAccounts(units, cells)
        copies = Copies(
            server,
            timers,
            journal=journal,
            control=control,
            units=units,
            accounts=accounts,
            replicas=config.replicas,
        )
        return Context(
            server=server,
            timers=timers,
            config=config,
            codec=codec,
            journal=journal,
            control=control,
            units=units,
            accounts=accounts,
            copies=copies,
            cells=cells,
        )

    # The service

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        """See `Service.handlers`."""
        return {
            ReadTable: self._read_table,
            Admit: self._puts.admit,
            Withdraw: self._puts.withdraw,
            Written: self._puts.written,
            Claim: self._leases.claim,
            Ack: self._ack,
            Nack: self._leases.nack,
            Renew: self._leases.renew,
            Remake: self._remake,
            Restore: self._puts.restore,
            Advance: self._advance,
            Lost: self._lost,
            Stats: self._stats,
            Close: self._close,
            Export: self._export,
            Release: self._release,
            Join: self._join,
            Retire: self._retire,
            Beat: self._beat,
            Dismiss: self._dismiss,
            Cancel: self._cancel,
        }

    @property
    def next_deadline(self) -> float | None:
        """See `Service.next_deadline`."""
        if self._journal_is_long:
            return self._context.server.now
        lease, timer = self._context.control.next_deadline, self._context.timers.next
        return lease if timer is None or (lease is not None and lease < timer) else timer

    def tick(self, now: float) -> None:
        """See `Service.tick`."""
        if self._journal_is_long:  # never during a change: it is written before it is made, and would be lost
            self._begin_journal()
        self._leases.expire()
        self._context.timers.run(now)

    def gone(self, client: str) -> None:
        """See `Service.gone`. The requests that the client waits for are dropped.

        The client may still live, and hold leases that another connection renews. Its leases and its unwritten
        admissions end at their own deadlines.
        """
        self._forget_waiting(lambda ticket: ticket.client == client)

    # Requests

    def _read_table(self, incoming: Incoming) -> Reply:
        units = self._context.units
        return Reply(Table(units.listing(), self._columns, self._specs, units.recovering, self._gathering))

    def _ack(self, incoming: Incoming) -> Reply:
        if self._leases.ack(incoming):
            self._puts.serve()
        return Reply(Accepted())

    def _advance(self, incoming: Incoming) -> Reply:
        message: Advance = incoming.message
        if message.version > self._context.control.version:
            self._context.journal.append(log.VersionAdvanced(message.version))
            self._context.control.advance(message.version)
            self._puts.serve()
        return Reply(Accepted())

    def _lost(self, incoming: Incoming) -> None:
        message: Lost = incoming.message
        if self._closed:
            raise QueueClosed("the queue was closed")
        self._losses.join(_LossWanted(incoming.ticket, message.wait_s, self._context.control))
        self._losses.serve()

    def _remake(self, incoming: Incoming) -> Reply:
        message: Remake = incoming.message
        groups = [number for [number] in unpack(message.groups, 1).tolist()]
        loss = self._context.control.remake(message.lease_id, groups, message.most)
        answer = _groups(dict.fromkeys(loss.groups, 0))
        if loss.groups:
            self._context.journal.append(log.GroupsRemade(*incoming.ticket, message.lease_id, loss.groups, answer))
            self._take_loss(loss)
            self._leases.serve()
        return Reply(answer)

    def _stats(self, incoming: Incoming) -> Reply:
        context = self._context
        stats = QueueStats(
            rows=len(context.control),
            bytes=context.accounts.nbytes,
            blocked_puts=self._puts.waiting,
            blocked_by=self._puts.blocked_by,
            put_wait_s=self._puts.wait_s,
            version=context.control.version,
            lost_groups=len(context.control.lost_groups),
            lacking_rows=context.copies.lacking,
            closed=self._closed,
            tasks=self._leases.stats(),
            units=context.units.stats(),
        )
        return Reply(Counted(stats))

    def _close(self, incoming: Incoming) -> Reply:
        if not self._closed:
            self._context.journal.append(log.Closed())
            self._shut()
        return Reply(Accepted())

    def _shut(self) -> None:
        self._closed = True
        self._puts.close()
        self._leases.close()
        self._losses.send_away(lambda: QueueClosed("the queue was closed"))

    def _export(self, incoming: Incoming) -> Reply:
        context = self._context
        if context.units.recovering:
            raise PeerLost("units from before the controller restarted have not all come back; try again")
        hold = context.accounts.hold(incoming.ticket.client)
        # the reader of the snapshot may die unnoticed, and the units would keep all rows that leave
        context.timers.at(context.server.now + context.config.lease_s, partial(context.accounts.release, hold))
        return Reply(Exported(context.control.export(), hold))

    def _release(self, incoming: Incoming) -> Reply:
        self._context.accounts.release(incoming.message.hold)
        return Reply(Accepted())

    def _join(self, incoming: Incoming) -> Reply:
        units = self._context.units
        unit = units.join(incoming.message)
        if unit.leaving and self._may_go(unit):
            units.release(unit)
            return Reply(Joined(unit.number, self._columns, leaving=True, left=True))
        return Reply(Joined(unit.number, self._columns, leaving=unit.leaving))

    def _may_go(self, unit: KnownUnit) -> bool:
        """Whether a unit that is to leave has nothing that others lack, or that is read or written there now."""
        context = self._context
        is_used = not unit.ready or context.accounts.is_held or bool(self._puts.on_their_way(unit.number))
        return not is_used and not context.copies.is_needed(unit)

    def _retire(self, incoming: Incoming) -> Reply:
        message: Retire = incoming.message
        self._context.units.retire(message.name)
        return Reply(Accepted())

    def _beat(self, incoming: Incoming) -> Reply:
        message: Beat = incoming.message
        client = incoming.ticket.client
        known = self._watches.get(client)
        if known is None or known[0] != message.limit_s:
            self._context.journal.append(log.ClientWatched(client, message.limit_s))
        self._watch(client, message.limit_s)
        return Reply(Accepted())

    def _dismiss(self, incoming: Incoming) -> Reply:
        message: Dismiss = incoming.message
        for client in self._context.server.answers.clients_named(message.name):
            self._forget_client(client)
        return Reply(Accepted())

    def _cancel(self, incoming: Incoming) -> Reply:
        ticket = Ticket(incoming.ticket.client, incoming.message.number)
        match self._context.server.answers.get(ticket):
            case Claimed() as claimed:
                self._leases.give_back(claimed.lease_id, None)
            case Admitted() as admitted:
                self._puts.withdraw_rows(row_ids(admitted.rows))
            case Exported() as exported:
                self._context.accounts.release(exported.hold)
            case None:
                self._puts.withdraw_small(ticket)
                self._forget_waiting(lambda waiting: waiting == ticket)
            case _:
                pass  # what was done cannot be undone: a consumed row stays consumed
        return Reply(Accepted())

    # Clients and units

    def _forget_waiting(self, gone: Callable[[Ticket], bool]) -> None:
        for forget in (self._puts.forget, self._leases.forget, self._losses.forget):
            forget(gone)

    def _forget_client(self, client: str) -> None:
        """End all that a dead client held: it gave no signs of life for too long, or was seen to end."""
        if client in self._watches:
            self._watches.pop(client)[1].cancel()
        self._leases.lose_client(client)
        self._puts.lose_client(client)
        self._context.accounts.lose_client(client)
        self._forget_waiting(lambda ticket: ticket.client == client)

    def _watch(self, client: str, limit_s: float) -> None:
        known = self._watches.get(client)
        if known is not None:
            known[1].cancel()
        timer = self._context.timers.at(self._context.server.now + limit_s, partial(self._forget_client, client))
        self._watches[client] = (limit_s, timer)

    def unit_listed(self, unit: KnownUnit, expected: StoredParts, listed: set[PartId]) -> None:
        """See `UnitObserver.unit_listed`."""
        context = self._context
        stored = context.control.stored(unit.number)
        lacking = [
            row
            for row, parts in expected.items()
            if row in stored and not all(PartId(*row, tag) in listed for tag, columns in parts.items() if columns)
        ]
        if lacking:
            context.journal.append(log.RowsGone(unit.number, pack(lacking)))
            self._take_loss(context.control.lose(unit.number, lacking))
            stored = context.control.stored(unit.number)
        here = [*stored, *self._puts.on_their_way(unit.number)]
        unit.rows, unit.bytes = len(here), sum(map(context.accounts.size, here))
        pending = {row for row in {RowId(*part[:2]) for part in listed} if self._puts.awaits(row)}
        self._settle_strange(unit, stored, listed, pending)
        self._puts.found(unit.number, list(pending))
        context.copies.look()
        self._leases.serve()
        self._puts.serve()

    def _settle_strange(self, unit: KnownUnit, stored: StoredParts, listed: set[PartId], pending: set[RowId]) -> None:
        gone, lost = [], []
        for part in listed:
            row = RowId(*part[:2])
            if row in stored:
                if part.tag not in stored[row] and not self._leases.is_live(part.tag):
                    lost.append(part)
            elif self._context.control.is_stored(row):
                self._context.accounts.leave_over(row, unit.number)
            elif row not in pending:
                gone.append(part)
        self._context.units.settle([unit.number], parts=lost)
        self._context.units.dismiss(unit.number, gone)

    def unit_leaves(self) -> None:
        """See `UnitObserver.unit_leaves`."""
        self._context.copies.look()

    def unit_died(self, unit: KnownUnit) -> None:
        """See `UnitObserver.unit_died`."""
        self._context.journal.append(log.UnitGone(unit.number))
        self._take_loss(self._context.control.lose(unit.number))
        self._puts.lose_unit(unit.number)
        self._context.copies.look()
        self._leases.serve()

    def _take_loss(self, loss: Loss) -> None:
        self._context.accounts.leave(loss.rows)
        self._leases.forget_over()
        self._losses.serve()
        self._puts.serve()

    # The journal

    @property
    def _journal_is_long(self) -> bool:
        journal = self._context.journal
        return journal.changes > 0 and journal.is_long

    def _begin_journal(self) -> None:
        """Replace the journal by one that begins with the present state."""
        context = self._context
        base = Base(self._specs, context.control.export(), self._closed, context.units.next_number)
        context.journal.replace(base, list(self._open_ends()))

    def _open_ends(self) -> Iterator[Change]:
        for unit in self._context.units.stats():
            yield log.UnitNamed(unit.number, unit.name)
        for number in self._context.units.leaving:
            yield log.UnitRetired(number)
        yield from self._puts.pending()
        yield from self._leases.leases()
        for client, (limit_s, _) in self._watches.items():
            yield log.ClientWatched(client, limit_s)
        for (client, number), answer in self._context.server.answers.items():
            yield log.RequestAnswered(client, number, cast(Answer, answer))  # the handlers return no other type

    def _recover(self, found: Recovered) -> None:
        context = self._context
        leases = [lease for lease in found.leases.values() if self._goes_on(lease)]
        answers = self._leases.restore(found.state, leases) | found.answers
        if found.closed:
            self._shut()
        context.units.next_number = found.next_unit
        for name, number in found.units.items():
            context.units.expect(number, name, leaving=number in found.retired)
        for record in found.state.rows:
            # parts are padded cell by cell, so the parts of a row are together as long as one part with all cells
            context.accounts.add([record.id], [context.codec.layout(record.facts.lengths).nbytes], record.units)
        for pending in found.pending.values():
            self._puts.resume(pending)
        named = {number for pending in found.pending.values() for number in pending.record.units}
        for gone in sorted(named.difference(found.units.values())):
            self._puts.lose_unit(gone)
        for ticket, answer in answers.items():
            context.server.answers.recall(ticket, answer)
        for client, limit_s in found.watched.items():
            self._watch(client, limit_s)

    def _goes_on(self, lease: log.RowsLeased) -> bool:
        """Whether a lease outlasts a restart of the controller: not where its task's batches are split among ranks.

        The restarted controller does not know how a batch was split. So no rank may keep its part while another rank
        has lost its part.
        """
        return lease.task not in self._split


def _groups(remade: Mapping[int, int]) -> Groups:
    """Pack groups, each with how often it was remade."""
    return Groups(pack(np.array(list(remade.items()), dtype=np.int64).reshape(-1, 2)))
