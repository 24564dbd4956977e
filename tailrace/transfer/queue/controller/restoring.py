"""Filling an empty queue from a snapshot, which a client writes to the units row by row."""

from collections.abc import Callable, Sequence

import msgspec

from tailrace.errors import QueueError
from tailrace.transfer.queue.controller.admission import Heard
from tailrace.transfer.queue.controller.desk import Desk
from tailrace.transfer.queue.controller.puts import Puts
from tailrace.transfer.queue.messages import Admitted, Restore, pack
from tailrace.transfer.queue.rows.state import ControlState, RowRecord
from tailrace.transfer.wire.frames import Reply
from tailrace.transfer.wire.server import Incoming


class Restoring:
    """Takes over states. While one is being written, puts wait."""

    def __init__(self, desk: Desk, puts: Puts, done: Callable[[], None]) -> None:
        """`done`: a state was taken over; the journal has to begin anew."""
        self._desk = desk
        self._puts = puts
        self._done = done

    def restore(self, incoming: Incoming) -> Reply:
        """A client has a snapshot.

        Raises:
            QueueError: rows have been here, the state contradicts itself, or there is no unit for it.
        """
        message: Restore = incoming.message
        desk, state = self._desk, message.state
        desk.control.check_restore(state)
        if self._puts.barred:
            raise QueueError("another snapshot is being restored")
        sizes = [desk.codec.layout(record.facts.lengths).nbytes for record in state.rows]
        units = [unit.number for unit in desk.units.choose(sum(sizes), desk.config.replicas)]
        if not units:
            raise QueueError(f"no storage unit has room for the {sum(sizes)} bytes of the snapshot")
        ids = [record.id for record in state.rows]
        if not ids:
            self._take(state, [])
            return Reply(Admitted(b"", units))
        self._puts.barred = True
        desk.stock.add(ids, sizes, units)

        def done(having: Sequence[int], heard: Heard) -> None:
            self._puts.barred = False
            self._take(state, having)
            heard()

        def undone() -> None:
            self._puts.barred = False
            desk.stock.withdraw(ids, units)
            desk.room_made()

        self._puts.expect(incoming.ticket.client, ids, units, done=done, undone=undone)
        return Reply(Admitted(pack(ids), units))

    def _take(self, state: ControlState, units: Sequence[int]) -> None:
        rows = [_here(record, tuple(units)) for record in state.rows]
        self._desk.control.restore(msgspec.structs.replace(state, rows=rows))
        self._done()
        self._desk.rows_ready()
        self._desk.room_made()


def _here(record: RowRecord, units: tuple[int, ...]) -> RowRecord:
    """A row whose cells were all written as one part, under tag 0."""
    return msgspec.structs.replace(record, consumed=dict.fromkeys(record.consumed, 0), units=units)
