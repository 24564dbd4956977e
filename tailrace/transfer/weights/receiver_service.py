"""What a receiver's thread does: it follows the sender's plan, fetches versions and gives them to others.

    sender ──Plan──▶ newest not here? ──▶ Download ──chunks──▶ ChunkServer ──▶ children      while it comes
               └──▶ BroadcastReceiver ──broadcast chunks──┘└──whole, seal right──▶ `received`, ReportProgress

Who waits on whom: a download on its parent, see there. GetPlan waits at the sender until the plan changes, so it is
also the sign of life in both directions. A version that has begun to come is finished, then the newest is fetched:
otherwise one that is published more often than it can be fetched would never be had. A sender that is lost is tried
again for ever; whoever waits for weights is told meanwhile.
"""

import secrets
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

from tailrace.config.weights import WeightsMedium
from tailrace.errors import SenderLost, TailraceError, WeightsError
from tailrace.events import Event, EventLog
from tailrace.registers.events import EventKind
from tailrace.transfer.shared_files import remove_orphans
from tailrace.transfer.weights.address import WeightsAddress, endpoint_towards
from tailrace.transfer.weights.broadcast.receiver import BroadcastReceiver
from tailrace.transfer.weights.chunk_server import ChunkServer
from tailrace.transfer.weights.download import Download, DownloadEnd, Owner
from tailrace.transfer.weights.media.base import Placed
from tailrace.transfer.weights.media.factory import backend_of
from tailrace.transfer.weights.messages import (
    NO_VERSION,
    NOTHING,
    AnswerOrError,
    EndTurn,
    GetChunk,
    GetManifest,
    GetPlan,
    GetSums,
    Leave,
    Plan,
    ReceiverProgress,
    ReportParent,
    ReportProgress,
    SenderClosed,
    TakeTurn,
    ask,
)
from tailrace.transfer.weights.segments import Attachments, Pool
from tailrace.transfer.weights.threads import Wakeups, Worker
from tailrace.transfer.weights.versions import Manifest, StoredVersion
from tailrace.transfer.wire.connection import Connection, Patience
from tailrace.transfer.wire.messages import Message
from tailrace.transfer.wire.server import Handler, Server, Service


class ReceiverService(Service, Owner):
    """Everything without another word is called in the thread of `server`."""

    def __init__(
        self,
        server: Server,
        address: WeightsAddress,
        *,
        name: str,
        host: str,
        datacentre: str,
        medium: WeightsMedium,
        patience: Patience,
        pool: Pool,
        log: EventLog | None,
    ) -> None:
        """Not connected before `start`. See `WeightReceiver`."""
        self.server, self.host, self.medium = server, host, medium
        self.retry_s = patience.retry_s
        self._address, self._name, self._datacentre, self._log = address, name, datacentre, log
        self._endpoint = endpoint_towards(address.endpoints, address.host)
        self._alone = secrets.token_hex(16)
        """A host of its own, for one that shares no memory."""
        self.pool = pool
        self._attachments = Attachments()
        self._placing = Worker(server, "memory for weights")
        """Finds memory, and is alone with the attachments."""
        self._chunk_server = ChunkServer(server)
        self._broadcasts = BroadcastReceiver(server, limit_s=patience.limit_s, changed=self._take_broadcasts)
        self._link: Connection | None = None
        self._plan: Plan | None = None
        self._download: Download | None = None
        self._again_at: float | None = None
        """When to connect to the sender, or ask a parent, again."""
        self._refused = NOTHING
        """The serial of the newest version that was given up."""
        self._requests: set[str] = set()
        """Turns that are wanted or had."""
        self.wakeups = Wakeups()
        self.lock = threading.Lock()
        """For what follows, which other threads read."""
        self.received: StoredVersion | None = None
        self.error: WeightsError | None = None
        """Why weights do not come at the moment."""
        self.refusal: tuple[int, WeightsError] | None = None
        """The newest version, if it was given up, and why."""
        self.announced = self.installed = NO_VERSION
        self.nbytes = self.bytes_broadcast = 0
        self.parent: str | None = None
        self.turns: set[str] = set()
        """Those of this receiver's that it has."""

    # For the server

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        """See `Service.handlers`."""
        return dict.fromkeys((GetManifest, GetSums, GetChunk), self._chunk_server.answer)

    @property
    def next_deadline(self) -> float | None:
        """See `Service.next_deadline`."""
        return self._again_at

    def tick(self, now: float) -> None:
        """See `Service.tick`."""
        self._again_at = None
        if self._link is None:
            self.start()
        self._advance()

    def gone(self, client: str) -> None:
        """See `Service.gone`."""
        self._chunk_server.forget_client(client)

    # With the sender

    def start(self) -> None:
        """Connect to the sender."""
        self._link = self.server.link(self._endpoint, peer="the sender of the weights")
        self._follow(0)
        for turn in self._requests:
            self._ask_for(turn)

    def report(self) -> None:
        """Tell how far this is."""
        if self._link is not None:
            ask(self._link, self._endpoint, ReportProgress(self._progress()), lambda heard: None, wait=False)

    def finish(self) -> None:
        """Say goodbye, and end `Server.run`."""
        if self._link is not None:
            ask(self._link, self._endpoint, Leave(), lambda heard: None, wait=False)
        self._broadcasts.close()
        self.server.stop()

    def join(self) -> None:
        """After `finish`, from another thread: wait for what is going on, and let go of memory of others."""
        self._broadcasts.join()
        self._placing.join()
        self._attachments.close()

    def take_turn(self, turn: str) -> None:
        """Ask for a turn; `turns` has it when it is there. Until `end_turn`."""
        self._requests.add(turn)
        self._ask_for(turn)

    def end_turn(self, turn: str) -> None:
        """Give it back, or ask no more for it."""
        self._requests.remove(turn)
        self.turns.discard(turn)
        self._give_back(turn)

    def _ask_for(self, turn: str) -> None:
        def heard(what: AnswerOrError) -> None:
            if turn not in self._requests:
                self._give_back(turn)  # it was asked for again, after it had been given back
            elif not isinstance(what, TailraceError):  # a sender that is lost shows by GetPlan
                self.turns.add(turn)
                self.wakeups.notify()

        if self._link is not None:  # else `start` asks
            ask(self._link, self._endpoint, TakeTurn(turn), heard, wait=True)

    def _give_back(self, turn: str) -> None:
        if self._link is not None:  # else the sender notices, like the death of a receiver
            ask(self._link, self._endpoint, EndTurn(turn), lambda heard: None, wait=False)

    def _progress(self) -> ReceiverProgress:
        reading = NOTHING if self._download is None else self._download.offer.serial
        return ReceiverProgress(reading, _version(self.received), self.installed, self.nbytes)

    def _follow(self, epoch: int) -> None:
        facts = (
            self._name,
            self.host if self.medium != "tcp" else self._alone,
            self._datacentre,
            self.server.endpoints,
            backend_of(self.medium),
        )
        assert self._link is not None
        link = self._link

        def heard(what: AnswerOrError) -> None:
            if link is self._link:
                self._on_plan(what)

        ask(link, self._endpoint, GetPlan(epoch, *facts, self._progress()), heard, wait=True)

    def _on_plan(self, heard: AnswerOrError) -> None:
        match heard:
            case (Plan() as plan, _):
                self.announced = max((offer.version for offer in plan.offers), default=NO_VERSION)
                self.error = None
                self._plan = plan
                self._broadcasts.hear(plan)
                self._advance()
                self._follow(plan.epoch)
                self.wakeups.notify()
            case (SenderClosed(), _):
                self._lose(SenderLost("the sender of the weights was closed"))
            case TailraceError() as error:
                self._lose(SenderLost(f"the sender of the weights is lost: {error}"))
            case _:
                self._lose(SenderLost("the sender of the weights answered something else"))

    def _lose(self, error: SenderLost) -> None:
        """Tell those that wait, and try again in a while."""
        link, self._link, self._plan = self._link, None, None
        assert link is not None
        self.server.unlink(link)
        self._broadcasts.leave()
        self._again_at = self.server.now + self.retry_s
        remove_orphans(self.pool.directory.parent)  # it may have been killed
        self.error = error
        self.wakeups.notify()

    # Versions

    def _advance(self) -> None:
        """Begin, go on with, or give up a download, as the plan says."""
        if self._plan is None:
            return
        offers = {offer.serial: offer for offer in self._plan.offers}
        download = self._download
        if download is not None:
            newest = self._plan.offers[-1].serial if self._plan.offers else NOTHING
            has_begun = download.stored is not None and download.stored.ready > 0
            if download.offer.serial not in offers or (download.offer.serial != newest and not has_begun):
                self._give_up(download)
        self._begin_newest()
        if self._download is not None:
            self._download.offer = offers[self._download.offer.serial]
            self._follow_parent(self._download)
            self._conclude(self._download)
        self._take_broadcasts()

    def _go_on(self) -> None:
        """Begin the newest version after another one, and say so: the sender keeps what somebody is at."""
        self._advance()
        self.report()

    def _begin_newest(self) -> None:
        assert self._plan is not None
        newest = self._plan.offers[-1] if self._plan.offers else None
        if self._download is None and newest is not None and newest.serial > max(self._refused, self._serial()):
            self._download = Download(self, newest)

    def _follow_parent(self, download: Download) -> None:
        assert self._plan is not None
        if self._again_at is None:
            self.parent = self._plan.parent
            download.follow(self._plan)

    def _take_broadcasts(self) -> None:
        """Take what was broadcast; it lies where it is until it is known where it goes, and if it is wanted."""
        while (received := self._broadcasts.first) is not None:
            download = self._download
            if download is not None and download.offer.serial == received.serial:
                if download.stored is None:
                    break
                download.take_broadcast(received)
            self._broadcasts.drop_first()
        if self._download is not None:
            self._download.go_on()

    def expects(self, serial: int) -> bool:
        """See `Owner.expects`."""
        return self._broadcasts.expects(serial)

    def _serial(self) -> int:
        return NOTHING if self.received is None else self.received.manifest.serial

    def take(self, manifest: Manifest, then: Placed) -> None:
        """See `Owner.take`. Versions whose memory is used again are not given any more."""
        with self.lock:
            kept = {self._serial(), manifest.serial} | self._used()  # the download moves what it has of its own
        self._let_go(stored for stored in self._chunk_server.versions if stored.manifest.serial not in kept)
        busy = self._chunk_server.segments
        self._placing.start(lambda: self.pool.take(manifest.nbytes, manifest.serial, busy=busy), then)

    def attach(self, path: Path, manifest: Manifest, then: Placed) -> None:
        """See `Owner.attach`."""
        self._placing.start(lambda: self._attachments.attach(path, manifest.serial, manifest.nbytes), then)

    def _used(self) -> set[int]:
        return {stored.manifest.serial for stored in self._chunk_server.versions if stored.users}

    def changed(self, download: Download, *, nbytes: int) -> None:
        """See `Owner.changed`."""
        if download.stored is None or download is not self._download:
            return
        self.nbytes += nbytes
        self._chunk_server.add(download.stored)
        if self._broadcasts.first is not None and not nbytes:
            self.server.call(self._take_broadcasts)  # there is room now
        self._conclude(download)

    def _conclude(self, download: Download) -> None:
        """Take a version that is whole, once its seal is known."""
        stored, seal = download.stored, download.offer.seal
        if download is not self._download or stored is None or not stored.whole or seal is None:
            return
        if stored.seal() != seal:
            download.reset()
            return
        download.leave()
        self._download = None
        with self.lock:
            self.received, self.refusal = stored, None
        self.tidy()
        self._emit(download)
        self.wakeups.notify()
        self.server.call(self._go_on)

    def tidy(self) -> None:
        """Let go of memory of others that is older than the newest version, and that nobody uses."""
        with self.lock:
            newest, used = self._serial(), self._used()
        old = (stored for stored in self._chunk_server.versions if stored.manifest.serial < newest)
        self._let_go(stored for stored in old if stored.manifest.serial not in used and not self._is_ours(stored))

    def _let_go(self, stored_versions: Iterable[StoredVersion]) -> None:
        """Give these no more; memory of others that they lie in may be used again."""
        for stored in list(stored_versions):
            self._chunk_server.drop([stored.manifest.serial])
            if not self._is_ours(stored):
                stored.segment.release()

    def _is_ours(self, stored: StoredVersion) -> bool:
        return stored.segment.path.is_relative_to(self.pool.directory)

    def ended(self, download: Download, end: DownloadEnd) -> None:
        """See `Owner.ended`. Called while the download is busy with it, so the rest is done a little later."""
        self.server.call(lambda: self._on_end(download, end))

    def _on_end(self, download: Download, end: DownloadEnd) -> None:
        if download is not self._download:
            return
        if end is DownloadEnd.REFUSED:
            self._refused = download.offer.serial
            self._give_up(download)
            assert download.error is not None, "it says why it is refused"
            self.refusal = (download.offer.version, download.error)
            self.wakeups.notify()
            self._complain("")  # children that wait for it here get it elsewhere
            self._go_on()
            return
        if end is DownloadEnd.GONE and self._is_outdated(download):
            self._give_up(download)  # its parent has gone on to a newer one: this is too slow for each of them
            self._go_on()
            return
        if end is DownloadEnd.PARENT_LOST and download.parent:
            self._complain(download.parent)
        download.leave()
        self._again_at = self.server.now + self.retry_s / 8  # by then there may be another plan

    def _complain(self, parent: str) -> None:
        """See `ReportParent`."""
        if self._link is not None:
            ask(self._link, self._endpoint, ReportParent(parent), lambda heard: None, wait=False)

    def _is_outdated(self, download: Download) -> bool:
        """Whether a newer version is on offer."""
        return self._plan is not None and any(offer.serial > download.offer.serial for offer in self._plan.offers)

    def _give_up(self, download: Download) -> None:
        download.leave()
        self._download = None
        self._chunk_server.drop([download.offer.serial])
        if download.stored is not None and download.medium == "shared_memory":
            download.stored.segment.release()

    def _emit(self, download: Download) -> None:
        if self._log is None or download.stored is None:
            return
        end = self._log.now()
        manifest = download.stored.manifest
        self._log.emit(
            Event(
                task=EventKind.WEIGHTS_TRANSFER,
                actor=self._name,
                start=end - (self.server.now - download.started),
                end=end,
                version=manifest.version,
                metrics={
                    "bytes": float(manifest.nbytes),
                    "network_bytes": float(download.nbytes),
                    "broadcast_bytes": float(download.bytes_broadcast),
                },
                info={"medium": download.medium},
            )
        )

    @property
    def bytes_sent(self) -> int:
        """Of weights, over sockets, to children."""
        return self._chunk_server.bytes_sent


def _version(stored: StoredVersion | None) -> int:
    return NO_VERSION if stored is None else stored.manifest.version
