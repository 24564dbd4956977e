"""One version on its way into a receiver, from whoever its parent is at the moment.

    ALONE ──parent──▶ DESCRIBING ──manifest──▶ PLACING ──memory──▶ PLACED ──no broadcast──▶ BRINGING ──last chunk, seal
      ▲                   │                      │                   │                         │            ▼
      └──────parent lost, or another one─────────┴───────────────────┴─────────────────────────┘          whole

What is here stays when the parent is another one. What is corrupt is asked for again, some times; then the version is
given up. While it is expected to come by a broadcast, it stays PLACED.
"""

import enum
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tailrace.config.weights import WeightsMedium
from tailrace.errors import PeerLost, TailraceError, WeightsError, WireError
from tailrace.transfer.weights.address import endpoint_towards
from tailrace.transfer.weights.broadcast.receiver import BroadcastChunk
from tailrace.transfer.weights.media.base import Medium, Placed
from tailrace.transfer.weights.media.factory import make_medium
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
from tailrace.transfer.wire.server import Server

TRIES = 5
"""For one chunk, or the manifest."""


class DownloadState(enum.Enum):
    """How far it is with its parent. Which follows which is drawn above; ALONE follows each."""

    ALONE = enum.auto()
    DESCRIBING = enum.auto()
    PLACING = enum.auto()
    PLACED = enum.auto()
    """Nothing is asked for."""
    BRINGING = enum.auto()


class DownloadPart(enum.Enum):
    """What may arrive corrupt, beside chunks."""

    MANIFEST = "the manifest"
    SEAL = "the seal"


class DownloadEnd(enum.Enum):
    """Why a download has ended, or cannot go on with its parent."""

    PARENT_LOST = enum.auto()
    GONE = enum.auto()
    """The parent does not give this version."""
    REFUSED = enum.auto()
    """It arrived corrupt too often, or there is no room for it; `Download.error` says."""


class Owner(ABC):
    """The receiver, as its download sees it."""

    server: Server
    host: str
    medium: WeightsMedium
    retry_s: float
    bytes_broadcast: int
    """That came by broadcasts, of all versions."""

    @abstractmethod
    def take(self, manifest: Manifest, then: Placed) -> None:
        """Find memory of this process's own, in another thread."""

    @abstractmethod
    def attach(self, path: Path, manifest: Manifest, then: Placed) -> None:
        """Find memory of another process on this host, held, in another thread."""

    @abstractmethod
    def expects(self, serial: int) -> bool:
        """Whether chunks of this version will come by a broadcast."""

    @abstractmethod
    def changed(self, download: "Download", *, nbytes: int) -> None:
        """A chunk more is here, or another `stored`; `nbytes` came over the network."""

    @abstractmethod
    def ended(self, download: "Download", end: DownloadEnd) -> None:
        """It waits for another parent, or for being given up."""


class Download:
    """Used in the receiver's thread."""

    def __init__(self, owner: Owner, offer: VersionOffer) -> None:
        """Nothing is asked until `follow`."""
        self.offer = offer
        self.stored: StoredVersion | None = None
        self.parent: str | None = None
        """Its name; None while there is none."""
        self.nbytes = 0
        """That came over the network."""
        self.bytes_broadcast = 0
        """Of these, by broadcasts."""
        self.started = owner.server.now
        self.error: WeightsError | None = None
        self._owner = owner
        self._is_ours = False
        """Whether the payload is in memory of this process's own."""
        self._same_host = False
        self._link: Connection | None = None
        self._endpoint = ""
        self._medium: Medium | None = None
        """Of a payload that has its place."""
        self._state = DownloadState.ALONE
        self._tries: Counter[int | DownloadPart] = Counter()
        self._errors: dict[int | DownloadPart, TailraceError] = {}
        """The last of each chunk, where it was one that a parent gave or that says what is wrong."""
        self._turn = 0
        """Counts parents: what an earlier one says is not heard."""

    def follow(self, plan: Plan) -> None:
        """Go on with the parent of `plan`, unless it is the same."""
        if plan.parent != self.parent:
            self.leave()
            self._connect(plan)

    def leave(self) -> None:
        """Hear no more of the parent. Harmless twice."""
        self._turn += 1
        self._state = DownloadState.ALONE
        self.parent = self._medium = None
        if self._link is not None:
            self._owner.server.unlink(self._link)
            self._link = None

    def reset(self) -> bool:
        """The seal is not right: fetch all chunks again; False where that was tried too often."""
        assert self.stored is not None, "a version whose seal is known is here"
        if not self.corrupt(DownloadPart.SEAL):
            return False
        self.stored = StoredVersion(self.stored.manifest, self.stored.encoded, self.stored.segment)
        self._owner.changed(self, nbytes=0)
        if self._state in (DownloadState.PLACED, DownloadState.BRINGING):  # else the next parent is asked
            self._bring()
        return True

    @property
    def medium(self) -> str:
        """What it comes through."""
        if self.bytes_broadcast:
            return self._owner.medium
        return "tcp" if self._is_ours else "shared_memory"

    def take_broadcast(self, received: BroadcastChunk) -> None:
        """Keep a chunk that was broadcast, if it is lacking and right."""
        assert self.stored is not None, "there is room for it"
        if not self._is_ours or self.stored.sum(received.chunk) is not None:
            return
        if not received.is_right:
            self.corrupt(received.chunk)
            return
        self.stored.memory[self.stored.manifest.span(received.chunk)] = received.data
        self.bytes_broadcast += len(received.data)
        self._owner.bytes_broadcast += len(received.data)
        self.arrived(received.chunk, received.sum, nbytes=len(received.data))

    def go_on(self) -> None:
        """Fetch what is lacking, unless it is still expected to be broadcast."""
        if self._state is DownloadState.PLACED and not self._owner.expects(self.offer.serial):
            self._bring()

    # For media, see `Errand`

    @property
    def retry_s(self) -> float:
        """See `Errand.retry_s`."""
        return self._owner.retry_s

    def ask(self, question: WeightsQuestion, then: Callable[[AnswerOrError], None]) -> None:
        """See `Errand.ask`."""
        turn = self._turn

        def heard(what: AnswerOrError) -> None:
            if turn != self._turn:
                return
            if isinstance(what, PeerLost):
                self._owner.ended(self, DownloadEnd.PARENT_LOST)
            elif not isinstance(what, TailraceError) and isinstance(what[0], VersionGone):
                self._owner.ended(self, DownloadEnd.GONE)
            else:
                then(what)

        assert self._link is not None, "a download without a parent asks nothing"
        ask(self._link, self._endpoint, question, heard, wait=True)

    def take(self, manifest: Manifest, then: Placed) -> None:
        """See `Errand.take`."""
        turn = self._turn

        def placed(outcome: Segment | WeightsError) -> None:
            if turn == self._turn:
                then(outcome)

        self._owner.take(manifest, placed)

    def attach(self, path: Path, manifest: Manifest, then: Placed) -> None:
        """See `Errand.attach`."""
        turn = self._turn

        def placed(outcome: Segment | WeightsError) -> None:
            if turn == self._turn:
                then(outcome)
            elif isinstance(outcome, Segment):
                outcome.release()

        self._owner.attach(path, manifest, placed)

    def arrived(self, chunk: int, value: bytes, *, nbytes: int) -> None:
        """See `Errand.arrived`."""
        assert self.stored is not None
        self.stored.add(chunk, value)
        self.nbytes += nbytes
        self._owner.changed(self, nbytes=nbytes)

    def corrupt(self, chunk: int | DownloadPart, error: TailraceError | None = None) -> bool:
        """See `Errand.corrupt`."""
        self._tries[chunk] += 1
        if error is not None:
            self._errors[chunk] = error
        if self._tries[chunk] < TRIES:
            return True
        what = chunk.value if isinstance(chunk, DownloadPart) else f"chunk {chunk}"
        if (error := self._errors.get(chunk)) is None:
            how = f"arrived corrupt {TRIES} times"
        else:
            how = f"has not come right in {TRIES} tries: {error}"
        self._refuse(WeightsError(f"{what} of version {self.offer.version} {how}"))
        return False

    # With a parent

    def _connect(self, plan: Plan) -> None:
        self.parent = plan.parent
        self._same_host = plan.host == self._owner.host
        try:
            self._endpoint = endpoint_towards(plan.endpoints, plan.host)
            self._link = self._owner.server.link(self._endpoint, peer="the process that gives the weights")
        except (WeightsError, WireError):
            self._owner.ended(self, DownloadEnd.PARENT_LOST)
        else:
            self._describe()

    def _describe(self) -> None:
        self._state = DownloadState.DESCRIBING
        self.ask(GetManifest(self.offer.serial), self._on_described)

    def _on_described(self, heard: AnswerOrError) -> None:
        match heard:
            case (ManifestReply() as described, _):
                try:
                    manifest = decode_manifest(described.manifest, self.offer.manifest)
                except WeightsError as error:
                    if self.corrupt(DownloadPart.MANIFEST, error):
                        self._describe()
                else:
                    if self._is_ours:
                        self._begin(make_medium("tcp", self, same_host=False))
                    else:
                        self._place(manifest, described, same_host=self._same_host)
            case _:
                if self.corrupt(DownloadPart.MANIFEST, error_in(heard)):
                    self._describe()

    def _place(self, manifest: Manifest, described: ManifestReply, *, same_host: bool) -> None:
        """Have memory for the payload, with what is here already."""
        self._state = DownloadState.PLACING
        medium = make_medium(self._owner.medium, self, same_host=same_host)

        def placed(outcome: Segment | WeightsError) -> None:
            if isinstance(outcome, Segment):
                before, self.stored = self.stored, StoredVersion(manifest, described.manifest, outcome)
                self._is_ours = str(outcome.path) != described.segment
                if before is not None:
                    self._move(before)
                self._begin(medium)
            elif self._owner.medium == "auto" and same_host:
                self._place(manifest, described, same_host=False)  # its memory cannot be seen from here
            else:
                self._refuse(outcome)

        medium.place(manifest, described, placed)

    def _begin(self, medium: Medium) -> None:
        self._medium, self._state = medium, DownloadState.PLACED
        self._owner.changed(self, nbytes=0)
        self.go_on()

    def _bring(self) -> None:
        assert self._medium is not None, "it was placed"
        assert self.stored is not None, "it was placed"
        self._state = DownloadState.BRINGING
        self._medium.bring(self.stored)

    def _move(self, before: StoredVersion) -> None:
        """Keep what was mapped before, where this is memory of our own; its last owner may be dead."""
        assert self.stored is not None
        if self._is_ours:
            for chunk in range(before.ready):
                value = before.sum(chunk)
                assert value is not None
                span = before.manifest.span(chunk)
                self.stored.memory[span] = before.memory[span]
                self.stored.add(chunk, value)
        before.segment.release()

    def _refuse(self, error: WeightsError) -> None:
        self.error = error
        self._owner.ended(self, DownloadEnd.REFUSED)
