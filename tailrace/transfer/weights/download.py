"""The download of one version into a receiver, from its current parent.

    NO_PARENT ──parent──▶ DESCRIBING ──manifest──▶ PLACING ──memory──▶ PLACED ──no broadcast──▶ FETCHING ──▶ whole
      ▲                      │                        │                  │                         │
      └──────parent lost, or another one──────────────┴──────────────────┴─────────────────────────┘

Chunks that are here stay when the parent changes. Corrupt data is asked for again, a few times; then the version is
given up. A version that is expected by a broadcast stays PLACED.

Waiting: a download waits for its parent, as long as the parent gives signs of life.
"""

import enum
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.errors import PeerLost, TailraceError, WeightsError, WireError
from tailrace.transfer.weights.address import endpoint_towards
from tailrace.transfer.weights.broadcast.receiver import BroadcastChunk
from tailrace.transfer.weights.media.base import ChunkRequest, Medium
from tailrace.transfer.weights.media.factory import is_mapped, make_medium
from tailrace.transfer.weights.messages import (
    AnswerOrError,
    GetManifest,
    ManifestReply,
    Plan,
    VersionGone,
    VersionOffer,
    WeightsQuestion,
    ask,
    error_in,
)
from tailrace.transfer.weights.segments import Segment
from tailrace.transfer.weights.versions import Manifest, StoredVersion, decode_manifest
from tailrace.transfer.wire.connection import Connection

if TYPE_CHECKING:
    from tailrace.transfer.weights.receiver_service import ReceiverService

TRIES = 5
"""The number of attempts for one chunk, the manifest or the seal."""


class DownloadState(enum.Enum):
    """The progress of a download with its parent. The diagram above shows what follows; NO_PARENT may follow each."""

    NO_PARENT = enum.auto()
    DESCRIBING = enum.auto()
    PLACING = enum.auto()
    PLACED = enum.auto()
    """There is memory, and nothing is asked for."""
    FETCHING = enum.auto()


class DownloadPart(enum.Enum):
    """The parts beside chunks that may arrive corrupt."""

    MANIFEST = "the manifest"
    SEAL = "the seal"


class DownloadEnd(enum.Enum):
    """The reason why a download has ended, or cannot go on with its parent."""

    PARENT_LOST = enum.auto()
    GONE = enum.auto()
    """The parent does not serve this version."""
    REFUSED = enum.auto()
    """The version arrived corrupt too often, or there is no room for it; see `Download.error`."""


class Download:
    """One version that is being fetched. Used in the receiver's thread."""

    def __init__(self, service: "ReceiverService", offer: VersionOffer) -> None:
        """Ask nothing before `follow`. `service` is called for each chunk, and at the end."""
        self.offer = offer
        self.stored: StoredVersion | None = None
        """The part of the version that is here, once there is memory for it."""
        self.parent: str | None = None
        """The parent's name; None while there is no parent."""
        self.nbytes = 0
        """Bytes that came over the network."""
        self.bytes_broadcast = 0
        """The part of `nbytes` that came by broadcasts."""
        self.started = service.server.now
        self.error: WeightsError | None = None
        self._service = service
        self._is_ours = False
        """Whether the payload is in this process's own memory."""
        self._same_host = False
        self._link: Connection | None = None
        """The connection to the parent. Once it is closed, no answer of that parent arrives."""
        self._endpoint = ""
        self._medium: Medium | None = None
        """The medium of the chunks; set while FETCHING."""
        self._state = DownloadState.NO_PARENT
        self._tries: Counter[int | DownloadPart] = Counter()
        self._errors: dict[int | DownloadPart, TailraceError] = {}
        """The last error of each part; none for a part that was only corrupt."""

    def follow(self, plan: Plan) -> None:
        """Continue with the parent of `plan`; do nothing if it is the same parent."""
        if plan.parent != self.parent:
            self.leave()
            self._connect(plan)

    def leave(self) -> None:
        """Disconnect from the parent. Calling it twice is harmless."""
        self._state = DownloadState.NO_PARENT
        self.parent = self._medium = None
        if self._link is not None:
            self._service.server.unlink(self._link)
            self._link = None

    def reset(self) -> None:
        """Fetch all chunks again after a wrong seal, unless that was tried too often."""
        assert self.stored is not None, "a version whose seal is known is here"
        if not self._may_try_again(DownloadPart.SEAL):
            return
        self.stored = StoredVersion(self.stored.manifest, self.stored.encoded, self.stored.segment)
        self._service.placed(self)
        if self._state in (DownloadState.PLACED, DownloadState.FETCHING):  # else the next parent is asked
            self._fetch()

    @property
    def medium(self) -> str:
        """The name of the medium that the version comes through."""
        if self.bytes_broadcast:
            return self._service.medium
        return "tcp" if self._is_ours else "shared_memory"

    def take_broadcast(self, received: BroadcastChunk) -> None:
        """Keep a broadcast chunk, if it is missing here and right."""
        assert self.stored is not None, "there is room for it"
        if not self._is_ours or self.stored.sum(received.chunk) is not None:
            return
        if not received.is_right:
            self._may_try_again(received.chunk)
            return
        self.stored.memory[self.stored.manifest.span(received.chunk)] = received.data
        self.bytes_broadcast += len(received.data)
        self._add(received.chunk, received.sum, nbytes=len(received.data), by_broadcast=True)

    def go_on(self) -> None:
        """Fetch the missing chunks, unless they are still expected from a broadcast."""
        if self._state is DownloadState.PLACED and not self._service.broadcasts.expects(self.offer.serial):
            self._fetch()

    # The manifest, and memory for the payload

    def _connect(self, plan: Plan) -> None:
        self.parent = plan.parent
        self._same_host = plan.host == self._service.host
        try:
            self._endpoint = endpoint_towards(plan.endpoints, plan.host)
            self._link = self._service.server.link(self._endpoint, peer="the process that gives the weights")
        except (WeightsError, WireError):
            self._service.ended(self, DownloadEnd.PARENT_LOST)
        else:
            self._describe()

    def _describe(self) -> None:
        self._state = DownloadState.DESCRIBING
        self._ask(GetManifest(self.offer.serial), self._on_described)

    def _on_described(self, answer: AnswerOrError) -> None:
        match answer:
            case (ManifestReply() as described, _):
                try:
                    manifest = decode_manifest(described.manifest, self.offer.manifest)
                except WeightsError as error:
                    if self._may_try_again(DownloadPart.MANIFEST, error):
                        self._describe()
                else:
                    if self._is_ours:
                        self._on_placed()
                    else:
                        mapped = is_mapped(self._service.medium, same_host=self._same_host)
                        self._place(manifest, described, mapped=mapped)
            case _:
                if self._may_try_again(DownloadPart.MANIFEST, error_in(answer)):
                    self._describe()

    def _place(self, manifest: Manifest, described: ManifestReply, *, mapped: bool) -> None:
        """Get memory for the payload: the parent's if `mapped`, else this process's own."""
        self._state = DownloadState.PLACING
        memory, link = self._service.memory, self._link

        def placed(outcome: Segment | WeightsError) -> None:
            if link is not self._link:
                if isinstance(outcome, Segment):
                    memory.release(outcome)  # it was found for a former parent
            elif isinstance(outcome, Segment):
                self._store(StoredVersion(manifest, described.manifest, outcome), is_ours=not mapped)
                self._on_placed()
            elif self._service.medium == "auto" and mapped:
                self._place(manifest, described, mapped=False)  # the parent's memory cannot be seen from here
            else:
                self._refuse(outcome)

        if mapped:
            memory.attach(Path(described.segment), manifest, placed)
        else:
            memory.take(manifest, placed)

    def _store(self, stored: StoredVersion, *, is_ours: bool) -> None:
        """Use this memory from now on. If it is this process's own, copy the chunks from the former memory into it."""
        before, self.stored, self._is_ours = self.stored, stored, is_ours
        if before is not None and before.segment is stored.segment:
            self._service.memory.release(stored.segment)  # attached again after the parent was lost: it has one hold
        if before is not None and is_ours:  # the owner of the former memory may be dead
            for chunk in range(before.ready):
                value = before.sum(chunk)
                assert value is not None, "it is ready"
                span = before.manifest.span(chunk)
                stored.memory[span] = before.memory[span]
                stored.add(chunk, value)

    def _on_placed(self) -> None:
        self._state = DownloadState.PLACED
        self._service.placed(self)
        self.go_on()

    # Chunks

    def _fetch(self) -> None:
        """Begin to fetch the missing chunks."""
        assert self.stored is not None, "it was placed"
        self._state = DownloadState.FETCHING
        self._medium = make_medium(self.stored, mapped=not self._is_ours, retry_s=self._service.retry_s)
        self._send_requests(self._medium)

    def _send_requests(self, medium: Medium) -> None:
        for request in medium.requests():
            self._ask(request.question, partial(self._on_chunks, medium, request))

    def _on_chunks(self, medium: Medium, request: ChunkRequest, answer: AnswerOrError) -> None:
        if medium is not self._medium:
            return  # all chunks are being fetched again
        for arrival in request.read(answer):
            if arrival.sum is None:
                if not self._may_try_again(arrival.chunk, error_in(answer)):
                    return
                break
            self._add(arrival.chunk, arrival.sum, nbytes=arrival.nbytes)
            if medium is not self._medium:
                return  # that was the last chunk
        self._send_requests(medium)

    def _add(self, chunk: int, value: bytes, *, nbytes: int, by_broadcast: bool = False) -> None:
        """Record a chunk that is in place, with its sum; `nbytes` of it came over the network."""
        assert self.stored is not None, "it was placed"
        self.stored.add(chunk, value)
        self.nbytes += nbytes
        self._service.arrived(self, nbytes=nbytes, by_broadcast=by_broadcast)

    def _may_try_again(self, part: int | DownloadPart, error: TailraceError | None = None) -> bool:
        """Whether to fetch a part, such as a chunk, again: it was corrupt, or `error` came in its place.

        False after too many attempts: then the version is refused.
        """
        self._tries[part] += 1
        if error is not None:
            self._errors[part] = error
        if self._tries[part] < TRIES:
            return True
        what = part.value if isinstance(part, DownloadPart) else f"chunk {part}"
        if (error := self._errors.get(part)) is None:
            how = f"arrived corrupt {TRIES} times"
        else:
            how = f"has not come right in {TRIES} tries: {error}"
        self._refuse(WeightsError(f"{what} of version {self.offer.version} {how}"))
        return False

    def _refuse(self, error: WeightsError) -> None:
        self.error = error
        self._service.ended(self, DownloadEnd.REFUSED)

    def _ask(self, question: WeightsQuestion, then: Callable[[AnswerOrError], None]) -> None:
        """Ask the parent, and call `then` with the answer.

        `then` is not called if the parent is lost, no longer has the version, or was left.
        """

        def answered(answer: AnswerOrError) -> None:
            match answer:
                case PeerLost():
                    self._service.ended(self, DownloadEnd.PARENT_LOST)
                case (VersionGone(), _):
                    self._service.ended(self, DownloadEnd.GONE)
                case _:
                    then(answer)

        assert self._link is not None, "a download without a parent asks nothing"
        ask(self._link, self._endpoint, question, answered, wait=True)
