"""Producers at a controller.

    Admit ──decide──▶ units: rows are admitted and written ──▶ they enter
              └─────▶ an obstacle: a line for each weight version that rows wait for; the oldest first

Lost groups wait in their own line, before all others. They wait for a unit only, not for room in the queue: their room
was theirs before, and puts that wait for room may depend on them. A restarted producer may put a group that is still
being written: this second put steps aside until the writing has succeeded or failed.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from functools import partial

import msgspec

from tailrace.errors import (
    ColumnError,
    PeerLost,
    QueueClosed,
    QueueError,
    StaleRowError,
    StorageFull,
    TailraceError,
    WireError,
)
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.controller import journal as log
from tailrace.transfer.queue.controller.admission import (
    Admission,
    Admissions,
    Offer,
    PutAdmission,
    RestoreAdmission,
    SmallPut,
)
from tailrace.transfer.queue.controller.context import Context
from tailrace.transfer.queue.controller.inline_cells import cut
from tailrace.transfer.queue.controller.leases import Leases
from tailrace.transfer.queue.controller.replay import Pending
from tailrace.transfer.queue.controller.requests import new_facts, new_rows, part_bytes
from tailrace.transfer.queue.controller.waiting import Wait, Waiter, WaitLine
from tailrace.transfer.queue.messages import (
    Admit,
    Admitted,
    Answer,
    Restore,
    Withdraw,
    Withdrawn,
    Write,
    Written,
    pack,
    row_ids,
    unpack,
)
from tailrace.transfer.queue.rows.groups import Standing
from tailrace.transfer.queue.rows.schema import check_capacity, check_unit, late_put
from tailrace.transfer.queue.rows.state import RowHeader
from tailrace.transfer.queue.storage.base import PartId
from tailrace.transfer.wire.frames import Reply
from tailrace.transfer.wire.messages import Accepted
from tailrace.transfer.wire.server import Incoming, Ticket

_LOST = -1
"""The key of the line of lost groups that are put again."""


class Obstacle(Enum):
    """A reason why rows cannot be admitted now."""

    RECOVERING = "units have not come back"
    RESTORING = "a snapshot is being restored"
    BEING_PUT = "another producer writes the group"
    NO_UNIT = "no unit has room"
    VERSION = "the weight version is not there"
    FULL = "the queue is full"


class _Put(Waiter):
    """A producer that waits for its put."""

    def __init__(self, puts: "Puts", ticket: Ticket, message: Admit, offer: Offer) -> None:
        super().__init__(ticket, message.wait_s)
        self._puts = puts
        self.message = message
        self.offer = offer

    def attempt(self) -> Answer | Wait:
        """See `Waiter.attempt`."""
        return self._puts.admit_now(self)

    def late(self) -> QueueError:
        """See `Waiter.late`."""
        return late_put(len(self.offer.rows), self.limit_s, self._puts.explain(self))

    def count_wait(self, seconds: float) -> None:
        """See `Waiter.count_wait`."""
        self._puts.wait_s += seconds


class Puts:
    """Admits new rows, and adds them to the queue when they are written."""

    def __init__(
        self,
        context: Context,
        leases: Leases,
        put_columns: Collection[str],
        task_columns: Collection[str],
        *,
        restored: Callable[[], object],
    ) -> None:
        """Admit nothing yet.

        Args:
            put_columns: every new row brings these.
            task_columns: tasks write these, so no new row brings them.
            restored: called when a snapshot is restored, which may have lost groups.
        """
        self._context = context
        self._leases = leases
        self._restored = restored
        self._put_columns = frozenset(put_columns)
        self._task_columns = frozenset(task_columns)
        self._admissions = Admissions()
        self._small: dict[Ticket, PutAdmission] = {}
        """The admissions whose cells the controller is writing, by the ticket of the put that waits for it."""
        self._restoring: Admission | None = None
        """The snapshot that is being restored; meanwhile no put is admitted."""
        self._lines: dict[int, WaitLine[_Put]] = {}
        """The waiting puts, by the weight version that their rows wait for."""
        self._closed = False
        self.wait_s = 0.0
        """Seconds that answered puts have waited in all."""

    # Requests

    def admit(self, incoming: Incoming) -> Reply | None:
        """Handle Admit: a producer wants to put rows.

        Raises:
            QueueError: the rows can never be admitted.
        """
        message: Admit = incoming.message
        if self._closed:
            raise QueueClosed("the queue was closed")
        offer = self._offer(message)
        put = _Put(self, incoming.ticket, message, offer)
        if self._lines:
            self._context.control.check_groups(offer.rows)  # rows that can never be admitted do not wait
            self._line_of(offer).join(put)
            self.serve()
            return None
        answer = self.admit_now(put)
        if not isinstance(answer, Wait):
            return Reply(answer)
        if answer is not Wait.OVER:
            self._line_of(offer).join(put)
        return None

    def withdraw(self, incoming: Incoming) -> Reply:
        """Handle Withdraw: a producer will not write the admitted rows."""
        message: Withdraw = incoming.message
        self.withdraw_rows(row_ids(message.rows))
        groups = unpack(message.groups, 1)[:, 0].tolist()
        return Reply(Withdrawn(not any(map(self._context.control.has_entered, groups))))

    def written(self, incoming: Incoming) -> Reply | None:
        """Handle Written: a unit has rows.

        Raises:
            StaleRowError: some were withdrawn, or have left. The unit is told to forget those.
        """
        message: Written = incoming.message
        whole, others = self._admissions.written_packed(message.unit, message.rows)
        strange = self._refuse(message.unit, others)
        self._finish(whole, None if strange else incoming.ticket)
        if strange:
            raise StaleRowError(f"{strange[0]} was written too late: its admission was withdrawn, or it has left")
        return None if whole else Reply(Accepted())

    def restore(self, incoming: Incoming) -> Reply:
        """Handle Restore: a client has a snapshot for an empty queue, and will write its rows to the units.

        Raises:
            QueueError: the queue has held rows, the state contradicts itself, another snapshot is being restored, or
                no unit has room.
        """
        message: Restore = incoming.message
        context, state = self._context, message.state
        context.control.check_restore(state)
        if self._restoring is not None:
            raise QueueError("another snapshot is being restored")
        nbytes = sum(context.codec.layout(record.facts.lengths).nbytes for record in state.rows)
        units = [unit.number for unit in context.units.choose(nbytes, context.config.replicas)]
        if not units:
            raise QueueError(f"no storage unit has room for the {nbytes} bytes of the snapshot")
        admission = RestoreAdmission(context, incoming.ticket.client, state, units)
        if state.rows:
            self._restoring = admission
            self._expect(admission)
        else:
            self._finish([admission])
        return Reply(Admitted(admission.packed, units))

    # Events

    def found(self, unit: int, rows: Sequence[RowId]) -> None:
        """Note that a unit has these rows; it is told to forget those that it should not have."""
        whole, strange = self._admissions.written(unit, rows)
        self._refuse(unit, strange)
        self._finish(whole)

    def withdraw_rows(self, rows: Sequence[RowId]) -> None:
        """Undo the admission of `rows`; harmless where they have entered, or were withdrawn before.

        Raises:
            QueueError: the admission has other rows too.
        """
        admission = self._admissions.all_of(rows)
        if admission is not None:
            self._undo(admission)

    def withdraw_small(self, ticket: Ticket) -> None:
        """Undo the put of `ticket`, whose client gave up; harmless where the controller is not writing its cells."""
        if ticket in self._small:
            self._undo(self._small[ticket])

    def awaits(self, row: RowId) -> bool:
        """Whether a row was admitted and is still being written."""
        return row in self._admissions

    def on_their_way(self, unit: int) -> list[RowId]:
        """The rows of all admissions that `unit` takes part in."""
        return self._admissions.of_unit(unit)

    def serve(self) -> None:
        """Admit waiting puts, the oldest rows first: room was made, weights or a unit came, or a producer gave up."""
        for version in sorted(self._lines):
            line = self._lines[version]
            _, is_blocked = line.serve()
            if is_blocked:
                return
            if not len(line):
                del self._lines[version]

    def resume(self, pending: Pending) -> None:
        """Resume an admission from before the controller restarted."""
        record, request = pending.record, pending.record.request
        self._context.control.reserve(pending.rows, pending.ids)
        offer = self._offered(request, pending.rows)
        self._expect(PutAdmission(self._context, record, offer, pending.ids, None))

    def lose_unit(self, unit: int) -> None:
        """Go on without a unit that has died; undo admissions that no other unit takes part in."""
        for admission in self._admissions:
            if admission.missing.pop(unit, None) is None:
                continue
            if not admission.missing:
                self._undo(admission)
            elif admission.is_whole:
                self._finish([admission])
        self.serve()

    def lose_client(self, client: str) -> None:
        """Undo the puts of a client that has died."""
        self.forget(lambda ticket: ticket.client == client)
        for admission in self._admissions:
            if admission.client == client:
                self._undo(admission)

    def forget(self, gone: Callable[[Ticket], bool]) -> None:
        """Drop the waiting puts whose client no longer waits for the answer; `gone` tells by ticket."""
        if any([line.forget(gone) for line in self._lines.values()]):
            self.serve()

    def close(self) -> None:
        """Answer all waiting and later puts with QueueClosed."""
        self._closed = True
        for line in self._lines.values():
            line.send_away(lambda: QueueClosed("the queue was closed"))
        self._lines.clear()

    @property
    def waiting(self) -> int:
        """The number of puts that wait."""
        return sum(map(len, self._lines.values()))

    @property
    def blocked_by(self) -> str | None:
        """The reason why the first waiting put waits, in words; None where none waits."""
        heads = (line.head for _, line in sorted(self._lines.items()) if len(line))
        return next((self.explain(head) for head in heads), None)

    def pending(self) -> list[log.PutAdmitted]:
        """The records of puts that are admitted but not written, for a journal that is replaced."""
        return [admission.record for admission in self._admissions if isinstance(admission, PutAdmission)]

    # Decisions

    def admit_now(self, put: _Put) -> Answer | Wait:
        """Admit the rows of a put and return the answer, or Wait where an obstacle is in the way.

        Raises:
            QueueError: the rows can never be admitted.
        """
        message, offer = put.message, put.offer
        units = self._decide(put)
        if isinstance(units, Obstacle):
            return Wait.ASIDE if units is Obstacle.BEING_PUT else Wait.HERE
        ids = self._context.control.reserve(offer.rows)
        request = msgspec.structs.replace(message, cells=None, preferred=[], full=[])  # these serve the admission only
        record = log.PutAdmitted(*put.ticket, request, pack(ids), units)
        self._context.journal.append(record)
        if message.cells is None:
            self._expect(PutAdmission(self._context, record, offer, ids, None))
            return Admitted(record.rows, units)
        small = SmallPut(put.ticket, message.cells)
        self._write(record, offer, small)  # first, so that the units do their part meanwhile
        self._small[put.ticket] = admission = PutAdmission(self._context, record, offer, ids, small)
        self._expect(admission)
        return Wait.OVER

    def explain(self, put: _Put) -> str:
        """The reason why a put cannot be admitted now, in words."""
        try:
            obstacle = self._decide(put)
        except QueueError as error:
            return str(error)
        context, offer = self._context, put.offer
        control, config = context.control, context.config
        match obstacle:
            case Obstacle.RECOVERING:
                return "units from before the controller restarted have not all come back yet"
            case Obstacle.RESTORING:
                return "a snapshot is being restored"
            case Obstacle.BEING_PUT:
                return f"group {control.being_put(offer.rows)} is being written by another producer"
            case Obstacle.NO_UNIT:
                return f"no storage unit has room for {offer.nbytes} bytes; there are {context.units.ready} units"
            case Obstacle.VERSION:
                return f"its rows are for weight version {offer.not_before}, the newest is {control.version}"
            case Obstacle.FULL:
                return (
                    f"{len(control)} of {config.max_rows} rows and {context.accounts.nbytes} of {config.max_bytes} "
                    f"bytes are taken"
                )
        return "others were before it"

    def _decide(self, put: _Put) -> list[int] | Obstacle:
        """The units for the rows of a put, or the obstacle that it has to wait for.

        Raises:
            QueueError: the rows can never be admitted.
        """
        context, message, offer = self._context, put.message, put.offer
        standing = context.control.check_groups(offer.rows)
        if context.units.recovering:
            return Obstacle.RECOVERING
        if self._restoring is not None:
            return Obstacle.RESTORING
        if standing is Standing.BEING_PUT:
            return Obstacle.BEING_PUT
        units = context.units.choose(
            offer.nbytes, context.config.replicas, preferred=message.preferred, full=message.full
        )
        if not units:
            return Obstacle.NO_UNIT
        if standing is not Standing.LOST:
            if offer.not_before > context.control.version:
                return Obstacle.VERSION
            if not self._has_room(offer):
                return Obstacle.FULL
        return [unit.number for unit in units]

    def _has_room(self, offer: Offer) -> bool:
        context = self._context
        return (
            len(context.control) + len(offer.rows) <= context.config.max_rows
            and context.accounts.nbytes + offer.nbytes <= context.config.max_bytes
        )

    def _line_of(self, offer: Offer) -> WaitLine[_Put]:
        version = _LOST if self._context.control.is_lost(offer.rows) else offer.not_before
        if version not in self._lines:
            self._lines[version] = WaitLine(self._context.server, self._context.timers, self.serve)
        return self._lines[version]

    def _offer(self, message: Admit) -> Offer:
        """Validate an Admit, and return what it offers.

        Raises:
            QueueError: the rows can never be admitted.
        """
        rows = new_rows(message)
        if not rows:
            raise QueueError("got a put of no rows, expected one or more")
        if not message.runs:
            raise WireError(f"a put of {len(rows)} rows tells nothing of their cells")
        for run in message.runs:
            if missing := self._put_columns.difference(run.columns):
                raise ColumnError(f"rows lack column {min(missing)!r}, which tasks read and none writes")
            if written := self._task_columns.intersection(run.columns):
                raise ColumnError(f"rows bring column {min(written)!r}, which a task writes; leave it out")
        offer = self._offered(message, rows)
        if message.cells is not None and len(message.cells) != offer.nbytes:
            raise WireError(f"cells of {offer.nbytes} bytes were announced, and {len(message.cells)} came")
        config = self._context.config
        check_capacity(len(rows), offer.nbytes, config)
        if offer.nbytes > config.storage.max_bytes:
            check_unit(len(rows), offer.nbytes, max(config.storage.max_bytes, self._context.units.largest))
        return offer

    def _offered(self, message: Admit, rows: list[RowHeader]) -> Offer:
        facts = new_facts(message, len(rows))
        sizes = part_bytes(self._context.codec, message.runs)
        return Offer(rows, facts, sizes, sum(sizes), message.not_before)

    # Writing

    def _write(self, record: log.PutAdmitted, offer: Offer, small: SmallPut) -> None:
        """Write cells that came with an Admit to the units. The put is answered when they are written."""
        write = Write(0, record.rows, record.request.runs, None, told=True)
        frames = cut(small.cells, record.request.runs, offer.sizes)
        for number in record.units:
            self._context.units.write(number, write, frames, partial(self._on_written, record, small, number))

    def _on_written(self, record: log.PutAdmitted, small: SmallPut, unit: int, result: Reply | TailraceError) -> None:
        admission = self._small.get(small.ticket)
        if isinstance(result, Reply) and isinstance(result.answer, Accepted):
            if admission is not None and unit in admission.missing:
                admission.missing[unit].clear()
                self._finish([admission] if admission.is_whole else [])
            else:
                self._refuse(unit, row_ids(record.rows))
        elif admission is not None:
            if isinstance(result, StorageFull):
                self._context.units.note_full(unit)
            if isinstance(result, TailraceError) and not isinstance(result, PeerLost | QueueClosed):
                small.error = result
            self._undo(admission)

    def _expect(self, admission: Admission) -> None:
        """Start an admission. It is undone if its rows are not written within the time of a lease."""
        context = self._context
        too_late = partial(self._undo, admission)
        self._admissions.add(admission, context.timers.at(context.server.now + context.config.lease_s, too_late))

    def _finish(self, whole: Sequence[Admission], told: Ticket | None = None) -> None:
        """Let whole admissions enter. The request `told`, which completed them, is answered after the journal entry."""
        for admission in whole:
            admission.confirm()
        if whole and told is not None:
            self._context.server.reply(told, Accepted())
        for admission in whole:  # the producer goes on meanwhile
            self._forget(admission)
            admission.enter()
            if isinstance(admission, RestoreAdmission):
                self._restored()
        if whole:
            self._leases.serve()
            self.serve()  # a second put of the same group has waited for this

    def _undo(self, admission: Admission) -> None:
        self._forget(admission)
        admission.undo()
        self.serve()

    def _forget(self, admission: Admission) -> None:
        self._admissions.remove(admission)
        if admission is self._restoring:
            self._restoring = None
        if isinstance(admission, PutAdmission) and admission.small is not None:
            del self._small[admission.small.ticket]

    def _refuse(self, unit: int, rows: Iterable[RowId]) -> list[RowId]:
        """Return the rows that a unit should not have, and tell it to forget those that no other unit has."""
        control = self._context.control
        strange = [row for row in rows if not (control.is_stored(row) and unit in control.units(row))]
        for row in filter(control.is_stored, strange):
            self._context.accounts.leave_over(row, unit)
        unknown = [row for row in strange if not control.is_stored(row)]
        if unknown:
            self._context.units.dismiss(unit, [PartId(*row, 0) for row in unknown])
        return strange
