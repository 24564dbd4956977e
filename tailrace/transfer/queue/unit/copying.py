"""Copies a unit's parts to another unit, for the controller.

    controller ──Copy──▶ unit ──Write, one for each tag and list of columns──▶ other unit ──all Accepted──▶ answer

Waiting: nothing waits here. A unit that does not answer is an error after the limits of the link.
"""

from collections.abc import Sequence
from functools import partial

from tailrace.errors import QueueClosed, TailraceError, WireError
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.messages import STORAGE_UNIT, Copy, Run, Write, pack
from tailrace.transfer.queue.storage.base import PartBatch
from tailrace.transfer.wire.calls import Call, Outcome, expect
from tailrace.transfer.wire.messages import Accepted, Failure, Message
from tailrace.transfer.wire.server import Incoming, Server
from tailrace.transfer.wire.sockets import reachable


class Copying:
    """One Copy that is carried out. It answers the request when the other unit has answered every Write."""

    def __init__(
        self, server: Server, incoming: Incoming, batches: Sequence[PartBatch], frames: Sequence[bytes]
    ) -> None:
        """Send `batches`, each with its frame, to the unit that the Copy of `incoming` names.

        Raises:
            WireError: that unit cannot be reached from here.
        """
        message: Copy = incoming.message
        ways = reachable(message.to.endpoints, message.to.host)
        if not ways:
            raise WireError(f"unit {message.to.number} listens at {message.to.endpoints} alone: not reached from here")
        self._server = server
        self._ticket = incoming.ticket
        self._unanswered = len(batches)
        self._answer: Message = Accepted()
        self._link = server.link(ways[0], peer=STORAGE_UNIT)
        for batch, frame in zip(batches, frames, strict=True):
            self._link.start(Call(ways[0], _write(batch), [frame]), self._on_written)

    def _on_written(self, result: Outcome) -> None:
        if isinstance(result, QueueClosed):
            return  # this server stops, and hangs up by itself
        try:
            expect(result, Accepted)
        except TailraceError as error:
            self._answer = Failure.of(error)
        self._unanswered -= 1
        if not self._unanswered:
            self._server.call(partial(self._server.unlink, self._link))  # not while the link hands out its answers
            self._server.reply(self._ticket, self._answer)


def _write(batch: PartBatch) -> Write:
    rows = pack(RowId(part.slot, part.generation) for part in batch.parts)
    run = Run(len(batch.parts), list(batch.columns), pack(batch.lengths))
    return Write(batch.parts[0].tag, rows, [run], None, told=True)
