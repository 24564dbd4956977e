"""One version on its way into a receiver, from whoever its parent is at the moment.

    DESCRIBING ──manifest──▶ BRINGING ──last chunk, seal──▶ whole
         ▲                      │
         └──── another parent ──┘      what is here stays

What is corrupt is asked for again, some times; then the version is given up. Nothing is asked for while it is expected
to come by a broadcast.
"""

import enum
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tailrace.errors import PeerLost, TailraceError, WeightsError, WireError
from tailrace.transfer.queue.wire.connection import Connection
from tailrace.transfer.queue.wire.server import Server
from tailrace.transfer.weights.address import way_to
from tailrace.transfer.weights.broadcast_receiver import BroadcastChunk
from tailrace.transfer.weights.media.base import Medium
from tailrace.transfer.weights.media.factory import MediumName, make_medium
from tailrace.transfer.weights.messages import Describe, Described, Gone, Heard, Offer, Plan, Question, ask, error_in
from tailrace.transfer.weights.segments import Segment
from tailrace.transfer.weights.versions import Holding, Manifest, decode_manifest

TRIES = 5
"""For one chunk, or the manifest."""


class End(enum.Enum):
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
    medium: MediumName
    retry_s: float
    broadcast_bytes: int
    """That came by broadcasts, of all versions."""

    @abstractmethod
    def memory(self, manifest: Manifest) -> Segment:
        """Memory of this process's own. Raises WeightsError."""

    @abstractmethod
    def attach(self, path: Path, manifest: Manifest) -> Segment:
        """Memory of another process on this host, held. Raises WeightsError."""

    @abstractmethod
    def expects(self, serial: int) -> bool:
        """Whether chunks of this version will come by a broadcast."""

    @abstractmethod
    def changed(self, download: "Download", *, nbytes: int) -> None:
        """A chunk more is here, or another `holding`; `nbytes` came over the network."""

    @abstractmethod
    def ended(self, download: "Download", end: End) -> None:
        """It waits for another parent, or for being given up."""


class Download:
    """Used in the receiver's thread."""

    def __init__(self, owner: Owner, offer: Offer) -> None:
        """Nothing is asked until `follow`."""
        self.offer = offer
        self.holding: Holding | None = None
        self.parent: str | None = None
        """Its name; None while there is none."""
        self.nbytes = 0
        """That came over the network."""
        self.broadcast_bytes = 0
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
        self._is_asked = False
        """Whether the medium was told to bring what is lacking."""
        self._tries: Counter[int] = Counter()
        self._errors: dict[int, TailraceError] = {}
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
        self.parent = self._medium = None
        if self._link is not None:
            self._owner.server.unlink(self._link)
            self._link = None

    def reset(self) -> bool:
        """The seal is not right: fetch all chunks again; False where that was tried too often."""
        assert self.holding is not None, "a version whose seal is known is here"
        if not self.corrupt(-2):
            return False
        self.holding = Holding(self.holding.manifest, self.holding.encoded, self.holding.segment)
        self._owner.changed(self, nbytes=0)
        if self._medium is not None:  # else the next parent is asked
            self._is_asked = True
            self._medium.bring(self.holding)
        return True

    @property
    def medium(self) -> str:
        """What it comes through."""
        if self.broadcast_bytes:
            return self._owner.medium
        return "tcp" if self._is_ours else "shared_memory"

    def take_broadcast(self, received: BroadcastChunk) -> None:
        """Keep a chunk that was broadcast, if it is lacking and right."""
        assert self.holding is not None, "there is room for it"
        if not self._is_ours or self.holding.sum(received.chunk) is not None:
            return
        if not received.is_right:
            self.corrupt(received.chunk)
            return
        self.holding.memory[self.holding.manifest.span(received.chunk)] = received.data
        self.broadcast_bytes += len(received.data)
        self._owner.broadcast_bytes += len(received.data)
        self.arrived(received.chunk, received.sum, nbytes=len(received.data))

    def go_on(self) -> None:
        """Fetch what is lacking, unless it is still expected to be broadcast."""
        if self._is_asked or self._medium is None or self.holding is None:
            return
        if not self._owner.expects(self.offer.serial):
            self._is_asked = True
            self._medium.bring(self.holding)

    # For media, see `Errand`

    @property
    def retry_s(self) -> float:
        """See `Errand.retry_s`."""
        return self._owner.retry_s

    def ask(self, question: Question, then: Callable[[Heard], None]) -> None:
        """See `Errand.ask`."""
        turn = self._turn

        def heard(what: Heard) -> None:
            if turn != self._turn:
                return
            if isinstance(what, PeerLost):
                self._owner.ended(self, End.PARENT_LOST)
            elif not isinstance(what, TailraceError) and isinstance(what[0], Gone):
                self._owner.ended(self, End.GONE)
            else:
                then(what)

        assert self._link is not None, "a download without a parent asks nothing"
        ask(self._link, self._endpoint, question, heard, wait=True)

    def take(self, manifest: Manifest) -> Segment:
        """See `Errand.take`."""
        return self._owner.memory(manifest)

    def attach(self, path: Path, manifest: Manifest) -> Segment:
        """See `Errand.attach`."""
        return self._owner.attach(path, manifest)

    def arrived(self, chunk: int, value: bytes, *, nbytes: int) -> None:
        """See `Errand.arrived`."""
        assert self.holding is not None
        self.holding.add(chunk, value)
        self.nbytes += nbytes
        self._owner.changed(self, nbytes=nbytes)

    def corrupt(self, chunk: int, error: TailraceError | None = None) -> bool:
        """See `Errand.corrupt`."""
        self._tries[chunk] += 1
        if error is not None:
            self._errors[chunk] = error
        if self._tries[chunk] < TRIES:
            return True
        what = "the manifest" if chunk == -1 else "the seal" if chunk == -2 else f"chunk {chunk}"
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
            self._endpoint = way_to(plan.endpoints, plan.host)
            self._link = self._owner.server.link(self._endpoint)
        except (WeightsError, WireError):
            self._owner.ended(self, End.PARENT_LOST)
        else:
            self._describe()

    def _describe(self) -> None:
        self.ask(Describe(self.offer.serial), self._on_described)

    def _on_described(self, heard: Heard) -> None:
        match heard:
            case (Described() as described, _):
                try:
                    manifest = decode_manifest(described.manifest, self.offer.manifest)
                except WeightsError as error:
                    if self.corrupt(-1, error):
                        self._describe()
                else:
                    self._begin(manifest, described)
            case _:
                if self.corrupt(-1, error_in(heard)):
                    self._describe()

    def _begin(self, manifest: Manifest, described: Described) -> None:
        try:
            self._place(manifest, described)
        except WeightsError as error:
            self._refuse(error)
            return
        assert self.holding is not None, "it was placed"
        self._owner.changed(self, nbytes=0)
        self._is_asked = False
        self.go_on()

    def _place(self, manifest: Manifest, described: Described) -> None:
        """Have memory for the payload, with what is here already."""
        before = self.holding
        self._medium = make_medium("tcp" if self._is_ours else self._owner.medium, self, same_host=self._same_host)
        if self._is_ours:
            return
        try:
            segment = self._medium.place(manifest, described)
        except WeightsError:
            if self._owner.medium != "auto" or not self._same_host:
                raise
            self._medium = make_medium("tcp", self, same_host=False)  # its memory cannot be seen from here
            segment = self._medium.place(manifest, described)
        self.holding = Holding(manifest, described.manifest, segment)
        self._is_ours = not self._is_mapped(described)
        if before is not None:
            self._move(before)

    def _is_mapped(self, described: Described) -> bool:
        assert self.holding is not None
        return str(self.holding.segment.path) == described.segment

    def _move(self, before: Holding) -> None:
        """Keep what was mapped before, where this is memory of our own; its last owner may be dead."""
        assert self.holding is not None
        if self._is_ours:
            for chunk in range(before.ready):
                value = before.sum(chunk)
                assert value is not None
                span = before.manifest.span(chunk)
                self.holding.memory[span] = before.memory[span]
                self.holding.add(chunk, value)
        before.segment.release()

    def _refuse(self, error: WeightsError) -> None:
        self.error = error
        self._owner.ended(self, End.REFUSED)
