"""The controller of a queue across processes (AsyncFlow, section 3.3): one thread that knows the state of every row.

    producers ──Admit──▶ Puts: lines ──room, units──▶ admissions ──Written by units──▶ control plane, policies
    consumers ──Claim──▶ Claims: lines, one for each task and rank ◀──ready rows─────────────┘
              ──Ack────▶ control plane ──rows that left──▶ Stock: Settle to their units; room for the first producer

It sees no cells but small ones (`small`): units have them, and clients write to and read from units. Every decision is
in the journal before anybody hears of it, so a controller that is started anew goes on where this one stood, leases
included; it first waits for its units, since only they know what they have.

Who waits on whom: claims on ready rows, puts on room, a weight version or a unit, `lost_groups` on a loss: each in a
line, up to its own limit. Nobody else. A client that promised signs of life and gives none loses leases and admissions.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias, cast

import numpy as np

from tailrace.config.columns import COLUMNS, ColumnKind
from tailrace.config.transfer import ServiceQueueConfig
from tailrace.errors import PeerLost, QueueClosed, QueueTimeout
from tailrace.transfer.queue.base import QueueStats, RowId
from tailrace.transfer.queue.cells import PartCodec
from tailrace.transfer.queue.controller import journal as log
from tailrace.transfer.queue.controller.claims import Claims
from tailrace.transfer.queue.controller.desk import Desk
from tailrace.transfer.queue.controller.facts import part_bytes
from tailrace.transfer.queue.controller.journal import Base, Change, Journal
from tailrace.transfer.queue.controller.lines import Wait
from tailrace.transfer.queue.controller.puts import Puts
from tailrace.transfer.queue.controller.replay import Recovered, replay
from tailrace.transfer.queue.controller.restoring import Restoring
from tailrace.transfer.queue.controller.small import SmallCells
from tailrace.transfer.queue.controller.stock import Stock
from tailrace.transfer.queue.controller.timers import Timer, Timers
from tailrace.transfer.queue.controller.units import KnownUnit, Units
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
    Renew,
    Restore,
    Stats,
    Table,
    Withdraw,
    Written,
    pack,
    row_ids,
)
from tailrace.transfer.queue.rows.control_plane import ControlPlane
from tailrace.transfer.queue.rows.schema import put_columns
from tailrace.transfer.queue.rows.state import ControlState, Loss
from tailrace.transfer.queue.rows.table import QueueTask, check_table
from tailrace.transfer.queue.storage.base import PartId
from tailrace.transfer.wire.frames import Reply
from tailrace.transfer.wire.messages import Accepted, Beat, Cancel, Message
from tailrace.transfer.wire.server import Handler, Incoming, Server, Service, Ticket

StoredParts: TypeAlias = Mapping[RowId, Mapping[int, Sequence[str]]]
"""Rows of a unit, with the columns of each part by tag."""


class Controller(Service):
    """Serves the table `tasks` through `server`."""

    def __init__(
        self,
        server: Server,
        tasks: Sequence[QueueTask],
        config: ServiceQueueConfig,
        *,
        columns: Mapping[str, ColumnKind] = COLUMNS,
        journal: Journal,
    ) -> None:
        """`journal`: a new one, or that of a controller of the same table, which this one goes on from.

        Raises:
            QueueError: a table that rows cannot pass through, see `check_table`; a journal of another one.
        """
        check_table(tasks, columns)
        self._specs = [task.spec for task in tasks]
        self._split = {task.spec.name for task in tasks if None not in task.policy.ranks}
        """Tasks whose policy splits batches among ranks."""
        self._columns = dict(columns)
        self._server = server
        self._journal = journal
        self._replacing = False
        """Whether the journal is about to begin anew."""
        self._timers = Timers()
        self._watches: dict[str, tuple[float, Timer]] = {}
        """By client that promised signs of life: how soon, and what happens otherwise."""
        units = Units(
            server,
            self._timers,
            limit_s=config.unit_limit_s,
            named=lambda unit: self._note(log.Named(unit.number, unit.name)),
            asked=self._on_inventory_asked,
            died=self._on_unit_died,
        )
        codec = PartCodec(columns)
        small = SmallCells(codec)
        self._desk = Desk(
            server=server,
            config=config,
            codec=codec,
            control=ControlPlane(tasks, lease_s=config.lease_s),
            units=units,
            stock=Stock(units, small),
            small=small,
            timers=self._timers,
            note=self._note,
            rows_ready=lambda: self._claims.serve(),
            room_made=lambda: self._puts.serve(),
        )
        written = {column for task in tasks for column in task.spec.writes}
        self._puts = Puts(self._desk, put_columns(self._specs), written)
        self._claims = Claims(self._desk, tasks)
        self._restoring = Restoring(self._desk, self._puts, self._begin_journal)
        self._losses = self._desk.line(self._serve_losses)
        recovered = replay(journal.records(), tasks)
        if recovered is not None:
            self._recover(recovered)
        self._begin_journal()

    # The service

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        """See `Service.handlers`."""
        return {
            ReadTable: self._read_table,
            Admit: self._puts.admit,
            Withdraw: self._puts.withdraw,
            Written: self._puts.written,
            Claim: self._claims.claim,
            Ack: self._claims.ack,
            Nack: self._claims.nack,
            Renew: self._claims.renew,
            Restore: self._restoring.restore,
            Advance: self._advance,
            Lost: self._lost,
            Stats: self._stats,
            Close: self._close,
            Export: self._export,
            Release: self._release,
            Join: self._join,
            Beat: self._beat,
            Dismiss: self._dismiss,
            Cancel: self._cancel,
        }

    @property
    def next_deadline(self) -> float | None:
        """See `Service.next_deadline`."""
        times = [when for when in (self._timers.next, self._desk.control.next_deadline) if when is not None]
        return min(times, default=None)

    def tick(self, now: float) -> None:
        """See `Service.tick`."""
        self._claims.expire()
        self._timers.run(now)

    def gone(self, client: str) -> None:
        """See `Service.gone`: what it waited for is forgotten.

        It may live, and hold leases that another connection renews: those, and what it has not written yet, end at
        their own deadlines.
        """
        self._forget_waiting(lambda ticket: ticket.client == client)

    # Requests

    def _read_table(self, incoming: Incoming) -> Reply:
        desk = self._desk
        return Reply(Table(desk.units.listing(), self._columns, self._specs, desk.recovering))

    def _advance(self, incoming: Incoming) -> Reply:
        message: Advance = incoming.message
        if message.version > self._desk.control.version:
            self._note(log.Advanced(message.version))
            self._desk.control.advance(message.version)
            self._puts.serve()
        return Reply(Accepted())

    def _lost(self, incoming: Incoming) -> None:
        message: Lost = incoming.message
        if self._desk.closed:
            raise QueueClosed("the queue was closed")
        self._losses.join(
            incoming.ticket,
            message.wait_s,
            self._try_losses,
            late=lambda limit: QueueTimeout(f"no group was lost within {limit:g} s"),
            reason=lambda: "no group is lost",
            waited=lambda _: None,
        )
        self._serve_losses()

    def _try_losses(self) -> Groups | Wait:
        lost = self._desk.control.lost_groups
        return Groups(pack(np.array(lost, dtype=np.int64))) if lost else Wait.HERE

    def _serve_losses(self) -> None:
        self._losses.serve()

    def _stats(self, incoming: Incoming) -> Reply:
        desk = self._desk
        stats = QueueStats(
            rows=len(desk.control),
            bytes=desk.stock.nbytes,
            blocked_puts=self._puts.waiting,
            blocked_by=self._puts.blocked_by,
            put_wait_s=self._puts.wait_s,
            version=desk.control.version,
            lost_groups=len(desk.control.lost_groups),
            closed=desk.closed,
            tasks=self._claims.stats(),
            units=desk.units.stats(),
        )
        return Reply(Counted(stats))

    def _close(self, incoming: Incoming) -> Reply:
        if not self._desk.closed:
            self._note(log.Closed())
            self._desk.closed = True
            self._puts.close()
            self._claims.close()
            self._losses.send_away(lambda: QueueClosed("the queue was closed"))
        return Reply(Accepted())

    def _export(self, incoming: Incoming) -> Reply:
        if self._desk.recovering:
            raise PeerLost("units from before the controller was started anew have not all come back; try again")
        hold = self._desk.stock.hold(incoming.ticket.client)
        # whoever reads it may die unnoticed, and the units would keep all that leaves
        self._timers.at(self._server.now + self._desk.config.lease_s, lambda: self._desk.stock.release(hold))
        return Reply(Exported(self._desk.control.export(), hold))

    def _release(self, incoming: Incoming) -> Reply:
        self._desk.stock.release(incoming.message.hold)
        return Reply(Accepted())

    def _join(self, incoming: Incoming) -> Reply:
        unit = self._desk.units.join(incoming.message)
        return Reply(Joined(unit.number, self._columns))

    def _beat(self, incoming: Incoming) -> Reply:
        message: Beat = incoming.message
        client = incoming.ticket.client
        known = self._watches.get(client)
        if known is None or known[0] != message.limit_s:
            self._note(log.Watched(client, message.limit_s))
        self._watch(client, message.limit_s)
        return Reply(Accepted())

    def _dismiss(self, incoming: Incoming) -> Reply:
        message: Dismiss = incoming.message
        for client in self._server.clients_named(message.name):
            self._bury(client)
        return Reply(Accepted())

    def _cancel(self, incoming: Incoming) -> Reply:
        ticket = Ticket(incoming.ticket.client, incoming.message.number)
        match self._server.answered(ticket):
            case Claimed() as claimed:
                self._claims.give_back(claimed.lease_id, None)
            case Admitted() as admitted:
                self._puts.withdraw_rows(row_ids(admitted.rows))
            case Exported() as exported:
                self._desk.stock.release(exported.hold)
            case None:
                self._puts.withdraw_small(ticket)
                self._forget_waiting(lambda waiting: waiting == ticket)
            case _:
                pass  # what was done cannot be undone: a consumed row stays consumed
        return Reply(Accepted())

    # Clients and units

    def _forget_waiting(self, gone: Callable[[Ticket], bool]) -> None:
        for forget in (self._puts.forget, self._claims.forget, self._losses.forget):
            forget(gone)

    def _bury(self, client: str) -> None:
        """A client is dead: it broke its promise of signs of life, or somebody saw it end."""
        if client in self._watches:
            self._watches.pop(client)[1].cancel()
        self._claims.lose_client(client)
        self._puts.lose_client(client)
        self._desk.stock.lose_client(client)
        self._forget_waiting(lambda ticket: ticket.client == client)

    def _watch(self, client: str, limit_s: float) -> None:
        known = self._watches.get(client)
        if known is not None:
            known[1].cancel()
        self._watches[client] = (limit_s, self._timers.at(self._server.now + limit_s, lambda: self._bury(client)))

    def _on_inventory_asked(self, unit: KnownUnit) -> Callable[[set[PartId]], None]:
        """What a unit should have is what it should have had when it was asked: more may come meanwhile."""
        expected = self._desk.control.stored(unit.number)
        return lambda listed: self._on_listed(unit, expected, listed)

    def _on_listed(self, unit: KnownUnit, expected: StoredParts, listed: set[PartId]) -> None:
        control = self._desk.control
        stored = control.stored(unit.number)
        lacking = [
            row
            for row, parts in expected.items()
            if row in stored and not all(PartId(*row, tag) in listed for tag, columns in parts.items() if columns)
        ]
        if lacking:
            self._note(log.RowsGone(unit.number, pack(lacking)))
            self._take_loss(control.lose(unit.number, lacking))
            stored = control.stored(unit.number)
        here = [*stored, *self._puts.on_their_way(unit.number)]
        unit.rows, unit.bytes = len(here), sum(map(self._desk.stock.size, here))
        pending = {RowId(*part[:2]) for part in listed if self._puts.awaits(RowId(*part[:2]))}
        self._settle_strange(unit, listed, stored, pending)
        self._puts.found(unit.number, list(pending))
        self._claims.serve()
        self._puts.serve()

    def _settle_strange(
        self,
        unit: KnownUnit,
        listed: set[PartId],
        stored: StoredParts,
        pending: set[RowId],
    ) -> None:
        gone, lost = [], []
        for part in listed:
            row = RowId(*part[:2])
            if row in stored:
                if part.tag not in stored[row] and not self._claims.is_live(part.tag):
                    lost.append(part)
            elif row not in pending:
                gone.append(part)
        self._desk.units.settle([unit.number], parts=lost)
        self._desk.dismiss(unit.number, gone)

    def _on_unit_died(self, unit: KnownUnit) -> None:
        self._note(log.UnitGone(unit.number))
        self._take_loss(self._desk.control.lose(unit.number))
        self._puts.lose_unit(unit.number)
        self._claims.serve()

    def _take_loss(self, loss: Loss) -> None:
        self._desk.stock.leave(loss.rows)
        self._claims.forget_over()
        self._serve_losses()
        self._puts.serve()

    # The journal

    def _note(self, change: Change) -> None:
        self._journal.append(change)
        if self._journal.is_long and not self._replacing:
            self._replacing = True
            # not now: the change is written before it is made, so half of this moment's state is that before it
            self._timers.at(self._server.now, self._begin_journal)

    def _begin_journal(self) -> None:
        """Replace the journal by one of this moment."""
        self._replacing = False
        self._journal.replace(self._base(), list(self._open_ends()))

    def _base(self) -> Base:
        desk = self._desk
        return Base(self._specs, desk.control.export(), desk.closed, desk.units.next_number)

    def _open_ends(self) -> Iterator[Change]:
        for unit in self._desk.units.stats():
            yield log.Named(unit.number, unit.name)
        yield from self._puts.pending()
        yield from self._claims.leases()
        for client, (limit_s, _) in self._watches.items():
            yield log.Watched(client, limit_s)
        for ticket, answer in self._server.kept():
            yield log.Answered(ticket.client, ticket.number, cast(Answer, answer))  # as its handlers return

    def _recover(self, found: Recovered) -> None:
        desk = self._desk
        records = self._claims.restore([lease for lease in found.leases.values() if self._goes_on(lease)])
        leases = desk.control.restore(found.state, leases=records, now=self._server.now)
        desk.closed = found.closed
        desk.units.next_number = found.next_unit
        for name, number in found.units.items():
            desk.units.expect(number, name)
        sizes = self._sizes(found.state)
        for record in found.state.rows:
            desk.stock.add([record.id], [sizes[record.id]], record.units)
        for pending in found.pending.values():
            self._puts.restore(pending, part_bytes(desk.codec, pending.record.request.runs))
        named = {number for pending in found.pending.values() for number in pending.record.units}
        for gone in sorted(named.difference(found.units.values())):
            self._puts.lose_unit(gone)
        for ticket, answer in (self._claims.answers(leases) | found.answers).items():
            self._server.recall(ticket, answer)
        for client, limit_s in found.watched.items():
            self._watch(client, limit_s)

    def _goes_on(self, lease: log.Leased) -> bool:
        """Whether a lease outlasts its controller: not where the rows of a batch are split among ranks.

        How they were split is not known any more, so no rank may keep its part while another has lost its own.
        """
        return lease.task not in self._split

    def _sizes(self, state: ControlState) -> dict[RowId, int]:
        """Bytes of each row. Parts are padded cell by cell, so those of one row are as long as one part with all."""
        return {record.id: self._desk.codec.layout(record.facts.lengths).nbytes for record in state.rows}
