"""Serves versions to other processes: the answers to GetManifest, GetSums and GetChunk.

    child ──question──▶ there? ──▶ answer        not yet: it waits        not any more, or skipped: VersionGone

Waiting: a child waits for the chunks of its parent, which may itself be waiting for its own. Nothing here waits for a
child. If memory is reused while a chunk is on its way, the chunk arrives with a wrong sum and is asked for again.
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
    """The served versions. Used in the thread of `server` alone, except for what `StoredVersion` allows."""

    def __init__(self, server: Server) -> None:
        """Start without versions."""
        self._server = server
        self._stored: dict[int, StoredVersion] = {}
        self._newest = 0
        self._waiting: dict[Ticket, ChunkQuestion] = {}
        self.bytes_sent = 0
        """Bytes of chunks that went over sockets. Other threads may read it."""

    def add(self, stored: StoredVersion) -> StoredVersion | None:
        """Serve this version, too. Older versions that are not here count as gone from now on.

        Return the version that was served under the same serial before, if any.
        """
        before = self._stored.get(stored.manifest.serial)
        self._stored[stored.manifest.serial] = stored
        self._newest = max(self._newest, stored.manifest.serial)
        self.answer_waiting()
        return before

    def drop(self, serials: Iterable[int]) -> None:
        """Stop serving these versions."""
        for serial in serials:
            self._stored.pop(serial, None)
        self.answer_waiting()

    @property
    def serials(self) -> list[int]:
        """The serials of the served versions, in the order in which they came."""
        return list(self._stored)

    @property
    def versions(self) -> list[StoredVersion]:
        """The served versions, in the order in which they came."""
        return list(self._stored.values())

    @property
    def segments(self) -> list[Segment]:
        """The memory of the served versions."""
        return [stored.segment for stored in self._stored.values()]

    def answer(self, incoming: Incoming) -> Reply | None:
        """Return the answer to a `ChunkQuestion`, or None if it has to wait; the answer is then sent later.

        Raises:
            WireError: the version has no such chunk.
        """
        wanted: ChunkQuestion = incoming.message
        reply = self._reply(wanted)
        if reply is None:
            self._wait(incoming.ticket, wanted)
            return None if (reply := self._reply(wanted)) is None else self._take_off(incoming.ticket, reply)
        return reply

    def answer_waiting(self) -> None:
        """Answer the waiting questions that new chunks or a dropped version have settled."""
        waiting, self._waiting = self._waiting, {}
        for ticket, wanted in waiting.items():
            self._wait(ticket, wanted)  # before the check: a chunk may be added meanwhile
            try:
                reply = self._reply(wanted)
            except WireError as error:
                reply = Reply(Failure.of(error))
            if reply is not None:
                self._server.reply(ticket, *self._take_off(ticket, reply))

    def forget_client(self, client: str) -> None:
        """Forget the questions of a child that has gone."""
        for ticket in [ticket for ticket in self._waiting if ticket.client == client]:
            del self._waiting[ticket]

    def _take_off(self, ticket: Ticket, reply: Reply) -> Reply:
        serial = self._waiting.pop(ticket).serial
        stored = self._stored.get(serial)
        if stored is not None:  # the thread that adds chunks must not call again for this answer
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
    """The number of chunks that must be there for the answer."""
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
