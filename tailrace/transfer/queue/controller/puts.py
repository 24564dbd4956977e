"""Producers at a controller.

    Admit ──▶ a line for each weight version that rows wait for; the oldest first ──room, units──▶ admissions ──▶ rows

Groups that were lost wait in a line of their own, before all others, and for a unit only: the room that they take was
theirs before, and those who wait for room may wait for them. A group that is being written is put a second time by a
producer that was started anew: it stands aside until that writing is over, one way or the other.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from tailrace.errors import (
    ColumnError,
    PeerLost,
    QueueClosed,
    QueueError,
    QueueTimeout,
    StaleRowError,
    TailraceError,
    WireError,
)
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.controller import journal as log
from tailrace.transfer.queue.controller.admission import Admission, Admissions, Done, Heard, Offer, nobody
from tailrace.transfer.queue.controller.desk import Desk
from tailrace.transfer.queue.controller.facts import cell_facts, check_facts, new_rows, part_bytes
from tailrace.transfer.queue.controller.lines import Line, Wait
from tailrace.transfer.queue.controller.replay import Pending
from tailrace.transfer.queue.messages import (
    Admit,
    Admitted,
    Answer,
    Run,
    Withdraw,
    Withdrawn,
    Write,
    Written,
    pack,
    row_ids,
    unpack,
)
from tailrace.transfer.queue.rows.schema import RAISE_LIMIT, check_capacity, check_unit
from tailrace.transfer.queue.rows.state import RowHeader
from tailrace.transfer.queue.storage.base import PartId
from tailrace.transfer.wire.frames import Reply
from tailrace.transfer.wire.messages import Accepted, Failure
from tailrace.transfer.wire.server import Incoming, Ticket

_LOST = -1
"""The line of groups that are put again."""


@dataclass(slots=True, eq=False)
class Small:
    """A put whose cells came along with its Admit, and which is answered when they are written."""

    ticket: Ticket
    cells: bytes
    error: TailraceError = field(default_factory=lambda: StaleRowError("the units that were to have the rows are gone"))
    """What its producer is told where they are not."""


class Puts:
    """Admits new rows, and lets them in when they are written."""

    def __init__(self, desk: Desk, put_columns: Collection[str], task_columns: Collection[str]) -> None:
        """`put_columns`: every row brings them. `task_columns`: tasks write them, so no row brings them."""
        self._desk = desk
        self._put_columns = frozenset(put_columns)
        self._task_columns = frozenset(task_columns)
        self._admissions = Admissions()
        self._small: dict[Ticket, list[RowId]] = {}
        """Rows that the controller is writing, by the put whose answer waits for that."""
        self._lines: dict[int, Line] = {}
        """By the weight version that their rows wait for."""
        self.barred = False
        """Whether nobody is let in, because a snapshot is being restored."""
        self.wait_s = 0.0
        """Seconds that puts which have been answered had to wait, in all."""

    # Requests

    def admit(self, incoming: Incoming) -> None:
        """A producer wants to put rows.

        Raises:
            QueueError: it never can.
        """
        message: Admit = incoming.message
        if self._desk.closed:
            raise QueueClosed("the queue was closed")
        offer = self._offer(message)
        again = self._desk.control.is_lost(offer.rows)
        self._line(_LOST if again else message.not_before).join(
            incoming.ticket,
            message.wait_s,
            lambda: self._try(incoming.ticket, message, offer),
            late=lambda limit: QueueTimeout(
                f"put of {len(offer.rows)} rows waited {limit:g} s: {self._obstacle(offer)}; {RAISE_LIMIT}"
            ),
            reason=lambda: self._obstacle(offer),
            waited=self._count_wait,
        )
        self.serve()

    def withdraw(self, incoming: Incoming) -> Reply:
        """A producer will not write what was admitted."""
        message: Withdraw = incoming.message
        self.withdraw_rows(row_ids(message.rows))
        groups = unpack(message.groups, 1)[:, 0].tolist()
        return Reply(Withdrawn(not any(map(self._desk.control.has_entered, groups))))

    def written(self, incoming: Incoming) -> Reply:
        """A unit has rows.

        Raises:
            StaleRowError: they were withdrawn, or have left: it is told to forget them.
        """
        message: Written = incoming.message
        accepted = Reply(Accepted())

        def heard() -> None:
            self._desk.server.reply(incoming.ticket, accepted.answer)

        if self._admissions.written_whole(message.unit, message.rows, heard):
            return accepted
        if strange := self.found(message.unit, row_ids(message.rows), heard):
            raise StaleRowError(f"{strange[0]} was written too late: its admission was withdrawn, or it has left")
        return accepted

    # Events

    def found(self, unit: int, rows: Sequence[RowId], heard: Heard = nobody) -> list[RowId]:
        """A unit has these rows; returns those that it should not have and is told to forget."""
        control = self._desk.control
        strange = [
            row
            for row in self._admissions.written(unit, rows, heard)
            if not (control.is_stored(row) and unit in control.units(row))
        ]
        if strange:
            self._desk.dismiss(unit, [PartId(*row, 0) for row in strange])
        return strange

    def withdraw_rows(self, rows: Sequence[RowId]) -> None:
        """What was admitted together will not be written; harmless where it has entered, or was withdrawn before."""
        self._admissions.withdraw(rows)

    def withdraw_small(self, ticket: Ticket) -> None:
        """Nobody waits any more for what the controller is writing for this put; harmless where that is nothing."""
        if ticket in self._small:
            self.withdraw_rows(self._small[ticket])

    def awaits(self, row: RowId) -> bool:
        """Whether a row is on its way."""
        return row in self._admissions

    def on_their_way(self, unit: int) -> list[RowId]:
        """Rows that are being written to a unit."""
        return self._admissions.of_unit(unit)

    def serve(self) -> None:
        """Room was made, weights or a unit came, or somebody gave up: let producers in, the oldest rows first."""
        for version in sorted(self._lines):
            line = self._lines[version]
            line.serve()
            if line.blocked:
                return
            if not len(line):
                del self._lines[version]

    def restore(self, pending: Pending, sizes: list[int]) -> None:
        """Rows were admitted before the controller was started anew."""
        record = pending.record
        self._desk.control.reserve(pending.rows, pending.ids)
        self._expect(record, self._offered(record.request, pending.rows, sizes), pending.ids)

    def expect(
        self,
        client: str,
        ids: Sequence[RowId],
        units: Sequence[int],
        *,
        done: Done,
        undone: Callable[[], None],
        record: log.Reserved | None = None,
    ) -> None:
        """A client is going to write these rows to all of these units."""
        desk = self._desk
        timer = desk.timers.at(desk.server.now + desk.config.lease_s, lambda: self._admissions.expire(admission))
        packed = pack(ids) if record is None else record.rows
        missing = {unit: set(ids) for unit in units}
        admission = Admission(client, list(ids), packed, missing, done, undone, timer, record)
        self._admissions.add(admission)

    def lose_unit(self, unit: int) -> None:
        """A unit died."""
        self._admissions.lose_unit(unit)
        self.serve()

    def lose_client(self, client: str) -> None:
        """A producer died."""
        self.forget(lambda ticket: ticket.client == client)
        self._admissions.lose_client(client)

    def forget(self, gone: Callable[[Ticket], bool]) -> None:
        """Nobody waits for these answers any more."""
        if any([line.forget(gone) for line in self._lines.values()]):
            self.serve()

    def close(self) -> None:
        """Send all producers away."""
        for line in self._lines.values():
            line.send_away(lambda: QueueClosed("the queue was closed"))
        self._lines.clear()

    @property
    def waiting(self) -> int:
        """Producers that wait."""
        return sum(map(len, self._lines.values()))

    @property
    def blocked_by(self) -> str | None:
        """What the first of them waits for."""
        return next((line.reason for _, line in sorted(self._lines.items()) if len(line)), None)

    def pending(self) -> list[log.Reserved]:
        """What was admitted and is not written, for a journal that begins anew."""
        return self._admissions.records()

    def _line(self, version: int) -> Line:
        if version not in self._lines:
            self._lines[version] = self._desk.line(self.serve)
        return self._lines[version]

    def _count_wait(self, seconds: float) -> None:
        self.wait_s += seconds

    def _offer(self, message: Admit) -> Offer:
        rows = new_rows(message)
        for run in message.runs:
            if missing := sorted(self._put_columns.difference(run.columns)):
                raise ColumnError(f"rows lack column {missing[0]!r}, which tasks read and none writes")
            if written := sorted(self._task_columns.intersection(run.columns)):
                raise ColumnError(f"rows bring column {written[0]!r}, which a task writes; leave it out")
        if not rows:
            raise QueueError("got a put of no rows, expected one or more")
        sizes = part_bytes(self._desk.codec, message.runs)
        offer = self._offered(message, rows, sizes)
        if message.cells is not None and len(message.cells) != offer.nbytes:
            raise WireError(f"cells of {offer.nbytes} bytes were announced, and {len(message.cells)} came")
        check_capacity(len(rows), offer.nbytes, self._desk.config)
        check_unit(len(rows), offer.nbytes, max(self._desk.config.storage.max_bytes, self._desk.units.largest))
        if self._desk.control.being_put(rows) is None:
            self._desk.control.check_groups(rows)
        return offer

    def _offered(self, message: Admit, rows: list[RowHeader], sizes: list[int]) -> Offer:
        check_facts(message.runs, message.versions, len(rows))
        return Offer(rows, message.not_before, sizes, sum(sizes))

    def _obstacle(self, offer: Offer) -> str:
        """What bars rows from coming in, in words; nothing where nothing does."""
        desk, not_before = self._desk, offer.not_before
        rows, nbytes = len(desk.control), desk.stock.nbytes
        if desk.recovering:
            return "units from before the controller was started anew have not all come back yet"
        if self.barred:
            return "a snapshot is being restored"
        if (group_id := desk.control.being_put(offer.rows)) is not None:
            return f"group {group_id} is being written by another producer"
        if not desk.units.choose(offer.nbytes, desk.config.replicas):
            return f"no storage unit has room for {offer.nbytes} bytes; there are {len(desk.units.ready)} units"
        if desk.control.is_lost(offer.rows):
            return ""
        if not_before > desk.control.version:
            return f"its rows are for weight version {not_before}, the newest is {desk.control.version}"
        config = desk.config
        if rows + len(offer.rows) > config.max_rows or nbytes + offer.nbytes > config.max_bytes:
            return f"{rows} of {config.max_rows} rows and {nbytes} of {config.max_bytes} bytes are taken"
        return ""

    def _try(self, ticket: Ticket, message: Admit, offer: Offer) -> Answer | Wait:
        desk = self._desk
        if desk.control.being_put(offer.rows) is not None:
            return Wait.ASIDE
        if self._obstacle(offer):
            return Wait.HERE
        desk.control.check_groups(offer.rows)
        ids = desk.control.reserve(offer.rows)
        chosen = desk.units.choose(offer.nbytes, desk.config.replicas, preferred=message.preferred, full=message.full)
        units = [unit.number for unit in chosen]
        request = msgspec.structs.replace(message, cells=None, preferred=[], full=[])  # of use once
        record = log.Reserved(ticket.client, ticket.number, request, pack(ids), units)
        desk.note(record)
        if message.cells is None:
            self._expect(record, offer, ids)
            return Admitted(record.rows, record.units)
        self._write(Small(ticket, message.cells), record, offer, ids)
        return Wait.OVER

    def _write(self, small: Small, record: log.Reserved, offer: Offer, ids: list[RowId]) -> None:
        """Write cells that came along, and answer when that has come about."""
        desk = self._desk
        self._expect(record, offer, ids, small)

        def then(unit: int, result: Reply | TailraceError) -> None:
            if isinstance(result, Reply) and isinstance(result.answer, Accepted):
                self.found(unit, ids)
            elif ids[0] in self._admissions:
                if isinstance(result, TailraceError) and not isinstance(result, PeerLost | QueueClosed):
                    small.error = result
                self._admissions.withdraw(ids)

        write = Write(0, record.rows, record.request.runs, None, told=True)
        frames = cut(small.cells, record.request.runs, offer.sizes)
        for number in record.units:
            desk.units.write(number, write, frames, partial(then, number))

    def _expect(self, record: log.Reserved, offer: Offer, ids: list[RowId], small: Small | None = None) -> None:
        desk = self._desk
        desk.stock.add(ids, offer.sizes, record.units)
        if small is not None:
            self._small[small.ticket] = ids

        def done(units: Sequence[int], heard: Heard) -> None:
            desk.note(log.Entered(record.rows, list(units)))
            heard()
            facts = cell_facts(record.request.runs, record.request.versions, len(ids))
            if small is not None:
                del self._small[small.ticket]
                desk.server.reply(small.ticket, Admitted(record.rows, []))
                desk.small.add(ids, facts, offer.sizes, small.cells)
            left = desk.control.enter(ids, offer.rows, facts, units=tuple(units))
            desk.stock.leave(dict.fromkeys(left, units))
            desk.rows_ready()
            desk.room_made()  # and who puts the same group again has waited for this

        def undone() -> None:
            desk.note(log.Withdrew(record.rows))
            desk.control.withdraw(ids, offer.rows)
            desk.stock.leave(dict.fromkeys(ids, record.units))
            if small is not None:
                del self._small[small.ticket]
                desk.server.reply(small.ticket, Failure.of(small.error))
            desk.room_made()

        self.expect(record.client, ids, record.units, done=done, undone=undone, record=record)


def cut(cells: bytes, runs: Sequence[Run], sizes: Sequence[int]) -> list[bytes]:
    """A frame for each run, of cells that lie one after the other; `sizes` are those of rows."""
    frames, row, start = [], 0, 0
    for run in runs:
        end = start + sum(sizes[row : row + run.rows])
        frames.append(cells[start:end])
        row, start = row + run.rows, end
    return frames
