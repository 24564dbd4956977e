"""The versions that a process gives to others: its answers to GetManifest, GetSums and GetChunk.

    child ──question──▶ there? ──▶ answer        not yet: it waits        not any more, or skipped: VersionGone

Who waits on whom: a child for the chunks of its parent, which may itself be waiting for its own. Nobody waits here for
a child. A chunk that is on its way when its memory is used again arrives with a wrong sum, and is asked for again.
"""

import math
from collections.abc import Iterable

from tailrace.errors import WireError
from tailrace.transfer.weights.messages import (
    ChunkReply,
    GetChunk,
    GetManifest,
    GetSums,
    ManifestReply,
    SumsReply,
    VersionGone,
)
from tailrace.transfer.weights.segments import Segment
from tailrace.transfer.weights.versions import StoredVersion
from tailrace.transfer.wire.frames import Reply
from tailrace.transfer.wire.messages import Failure
from tailrace.transfer.wire.server import Incoming, Server, Ticket

ChunkQuestion = GetManifest | GetSums | GetChunk


class ChunkServer:
    """Used in the thread of `server` alone, but for what `StoredVersion` allows."""

    def __init__(self, server: Server) -> None:
        """Empty."""
        self._server = server
        self._stored: dict[int, StoredVersion] = {}
        self._newest = 0
        self._waiting: dict[Ticket, ChunkQuestion] = {}
        self.bytes_sent = 0
        """Bytes of chunks that went over sockets. Other threads may read it."""

    def add(self, stored: StoredVersion) -> StoredVersion | None:
        """Give this version, too. Older ones that are not here will not come.

        Returns the one that was given under the same serial until now, if any.
        """
        before = self._stored.get(stored.manifest.serial)
        self._stored[stored.manifest.serial] = stored
        self._newest = max(self._newest, stored.manifest.serial)
        self.answer_waiting()
        return before

    def drop(self, serials: Iterable[int]) -> None:
        """Give these no more."""
        for serial in serials:
            self._stored.pop(serial, None)
        self.answer_waiting()

    @property
    def serials(self) -> list[int]:
        """Those that are given, in the order in which they came."""
        return list(self._stored)

    @property
    def versions(self) -> list[StoredVersion]:
        """Those that are given."""
        return list(self._stored.values())

    @property
    def segments(self) -> list[Segment]:
        """Memory that is given from."""
        return [stored.segment for stored in self._stored.values()]

    def answer(self, incoming: Incoming) -> Reply | None:
        """The answer to a `ChunkQuestion` now, or None: it comes when there is one.

        Raises:
            WireError: there is no such chunk in the version.
        """
        wanted: ChunkQuestion = incoming.message
        reply = self._reply(wanted)
        if reply is None:
            self._wait(incoming.ticket, wanted)
            return None if (reply := self._reply(wanted)) is None else self._take_off(incoming.ticket, reply)
        return reply

    def answer_waiting(self) -> None:
        """More chunks have come, or a version has gone: answer those that waited for that."""
        waiting, self._waiting = self._waiting, {}
        for ticket, wanted in waiting.items():
            self._wait(ticket, wanted)  # before looking: a chunk may be added meanwhile
            try:
                reply = self._reply(wanted)
            except WireError as error:
                reply = Reply(Failure.of(error))
            if reply is not None:
                self._server.reply(ticket, *self._take_off(ticket, reply))

    def forget_client(self, client: str) -> None:
        """A child has gone."""
        for ticket in [ticket for ticket in self._waiting if ticket.client == client]:
            del self._waiting[ticket]

    def _take_off(self, ticket: Ticket, reply: Reply) -> Reply:
        serial = self._waiting.pop(ticket).serial
        stored = self._stored.get(serial)
        if stored is not None:  # whoever adds chunks is not to call again for what was answered
            waiting = [wanted for wanted in self._waiting.values() if wanted.serial == serial]
            stored.wake_at = min(map(_chunks_for, waiting), default=math.inf)
        return reply

    def _wait(self, ticket: Ticket, wanted: ChunkQuestion) -> None:
        self._waiting[ticket] = wanted
        stored = self._stored.get(wanted.serial)
        if stored is not None:
            stored.wake_at = min(stored.wake_at, _chunks_for(wanted))

    def _reply(self, wanted: ChunkQuestion) -> Reply | None:
        stored = self._stored.get(wanted.serial)
        if stored is None:
            return None if wanted.serial > self._newest else Reply(VersionGone())
        match wanted:
            case GetManifest():
                return Reply(ManifestReply(stored.encoded, str(stored.segment.path)))
            case GetSums(_, have, want):
                _check(have < want <= stored.manifest.chunks, wanted, stored)
                return Reply(SumsReply(stored.sums(have))) if stored.ready >= want else None
            case GetChunk(_, chunk):
                _check(chunk < stored.manifest.chunks, wanted, stored)
                return self._chunk(stored, chunk)

    def _chunk(self, stored: StoredVersion, chunk: int) -> Reply | None:
        value = stored.sum(chunk)
        if value is None:
            return None
        data = stored.memory[stored.manifest.span(chunk)]
        self.bytes_sent += len(data)
        return Reply(ChunkReply(value), [data])


def _chunks_for(wanted: ChunkQuestion) -> float:
    """So many chunks must be there for the answer."""
    match wanted:
        case GetSums(_, _, want):
            return want
        case GetChunk(_, chunk):
            return chunk + 1
        case GetManifest():
            return math.inf


def _check(right: bool, wanted: ChunkQuestion, stored: StoredVersion) -> None:
    if not right:
        raise WireError(f"{wanted} asks for chunks that version {stored.manifest.version} has not")
