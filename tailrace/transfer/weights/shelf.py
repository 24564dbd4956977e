"""The versions that a process gives to others: its answers to Describe, Progress and Fetch.

    child ──question──▶ there? ──▶ answer        not yet: it waits        not any more, or skipped: Gone

Who waits on whom: a child for the chunks of its parent, which may itself be waiting for its own. Nobody waits here for
a child. A chunk that is on its way when its memory is used again arrives with a wrong sum, and is asked for again.
"""

import math
from collections.abc import Iterable

from tailrace.errors import WireError
from tailrace.transfer.weights.messages import (
    Chunk,
    Describe,
    Described,
    Fetch,
    Gone,
    Progress,
    Ready,
)
from tailrace.transfer.weights.segments import Segment
from tailrace.transfer.weights.versions import Holding
from tailrace.transfer.wire.frames import Reply
from tailrace.transfer.wire.messages import Failure
from tailrace.transfer.wire.server import Incoming, Server, Ticket

Wanted = Describe | Progress | Fetch


class Shelf:
    """Used in the thread of `server` alone, but for what `Holding` allows."""

    def __init__(self, server: Server) -> None:
        """Empty."""
        self._server = server
        self._holdings: dict[int, Holding] = {}
        self._newest = 0
        self._waiting: dict[Ticket, Wanted] = {}
        self.bytes_sent = 0
        """Of chunks, over sockets."""

    def put(self, holding: Holding) -> None:
        """Give this version, too. Older ones that are not here will not come."""
        self._holdings[holding.manifest.serial] = holding
        self._newest = max(self._newest, holding.manifest.serial)
        self.look()

    def drop(self, serials: Iterable[int]) -> None:
        """Give these no more."""
        for serial in serials:
            self._holdings.pop(serial, None)
        self.look()

    @property
    def serials(self) -> list[int]:
        """Those that are given, in the order in which they came."""
        return list(self._holdings)

    @property
    def holdings(self) -> list[Holding]:
        """Those that are given."""
        return list(self._holdings.values())

    @property
    def segments(self) -> list[Segment]:
        """Memory that is given from."""
        return [holding.segment for holding in self._holdings.values()]

    def answer(self, incoming: Incoming) -> Reply | None:
        """The answer to a `Wanted` now, or None: it comes when there is one.

        Raises:
            WireError: there is no such chunk in the version.
        """
        wanted: Wanted = incoming.message
        reply = self._reply(wanted)
        if reply is None:
            self._wait(incoming.ticket, wanted)
            return None if (reply := self._reply(wanted)) is None else self._forget(incoming.ticket, reply)
        return reply

    def look(self) -> None:
        """More chunks have come, or a version has gone: answer those that waited for that."""
        waiting, self._waiting = self._waiting, {}
        for ticket, wanted in waiting.items():
            self._wait(ticket, wanted)  # before looking: a chunk may be added meanwhile
            try:
                reply = self._reply(wanted)
            except WireError as error:
                reply = Reply(Failure.of(error))
            if reply is not None:
                self._server.reply(ticket, *self._forget(ticket, reply))

    def leave(self, client: str) -> None:
        """A child has gone."""
        for ticket in [ticket for ticket in self._waiting if ticket.client == client]:
            del self._waiting[ticket]

    def _forget(self, ticket: Ticket, reply: Reply) -> Reply:
        serial = self._waiting.pop(ticket).serial
        holding = self._holdings.get(serial)
        if holding is not None:  # whoever adds chunks is not to call again for what was answered
            waiting = [wanted for wanted in self._waiting.values() if wanted.serial == serial]
            holding.wake_at = min(map(_chunks_for, waiting), default=math.inf)
        return reply

    def _wait(self, ticket: Ticket, wanted: Wanted) -> None:
        self._waiting[ticket] = wanted
        holding = self._holdings.get(wanted.serial)
        if holding is not None:
            holding.wake_at = min(holding.wake_at, _chunks_for(wanted))

    def _reply(self, wanted: Wanted) -> Reply | None:
        holding = self._holdings.get(wanted.serial)
        if holding is None:
            return None if wanted.serial > self._newest else Reply(Gone())
        match wanted:
            case Describe():
                return Reply(Described(holding.encoded, str(holding.segment.path)))
            case Progress(_, have, want):
                _check(have < want <= holding.manifest.chunks, wanted, holding)
                return Reply(Ready(holding.sums(have))) if holding.ready >= want else None
            case Fetch(_, chunk):
                _check(chunk < holding.manifest.chunks, wanted, holding)
                return self._chunk(holding, chunk)

    def _chunk(self, holding: Holding, chunk: int) -> Reply | None:
        value = holding.sum(chunk)
        if value is None:
            return None
        data = holding.memory[holding.manifest.span(chunk)]
        self.bytes_sent += len(data)
        return Reply(Chunk(value), [data])


def _chunks_for(wanted: Wanted) -> float:
    """So many chunks must be there for the answer."""
    match wanted:
        case Progress(_, _, want):
            return want
        case Fetch(_, chunk):
            return chunk + 1
        case Describe():
            return math.inf


def _check(right: bool, wanted: Wanted, holding: Holding) -> None:
    if not right:
        raise WireError(f"{wanted} asks for chunks that version {holding.manifest.version} has not")
