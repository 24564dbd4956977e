"""The service in a receiver's thread: it follows the sender's plan, fetches versions and serves them to others.

    SenderConnection ──Plan──▶ newest not here? ──▶ Download ──chunks──▶ ReceiverMemory ──▶ children    while it comes
          ▲            └──▶ BroadcastReceiver ──broadcast chunks──┘└──whole, seal right──▶ `received`
          └────────────────────────ReportProgress, ReportParent───────────────────┘

Waiting: a download waits for its parent, and the connection for the sender; see there. Nothing else here waits. A
version that has begun to come is finished before the newest is fetched. Otherwise no version would ever be whole if
they are published faster than they can be fetched.
"""

import secrets
from collections.abc import Mapping

from tailrace.config.weights import WeightsMedium
from tailrace.errors import SenderLost
from tailrace.events import Event, EventLog
from tailrace.registers.events import EventKind
from tailrace.transfer.shared_files import remove_orphans
from tailrace.transfer.weights.address import WeightsAddress
from tailrace.transfer.weights.broadcast.receiver import BroadcastReceiver
from tailrace.transfer.weights.download import Download, DownloadEnd
from tailrace.transfer.weights.media.factory import backend_of
from tailrace.transfer.weights.messages import (
    NO_VERSION,
    NOTHING,
    GetChunk,
    GetManifest,
    GetPlan,
    GetSums,
    Plan,
    ReceiverProgress,
)
from tailrace.transfer.weights.receiver_memory import ReceiverMemory
from tailrace.transfer.weights.receiver_status import ReceiverStatus
from tailrace.transfer.weights.segments import Pool
from tailrace.transfer.weights.sender_connection import SenderConnection
from tailrace.transfer.weights.threads import Guarded, Wakeups
from tailrace.transfer.wire.connection import Patience
from tailrace.transfer.wire.messages import Message
from tailrace.transfer.wire.server import Handler, Server, Service


class ReceiverService(Service):
    """The receiver's side of the transfer.

    Used in the thread of `server`, except for `status`, `wakeups`, `join` and `memory.reading`.
    """

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
        """Connect at `sender.connect`, not before. See `WeightReceiver` for the arguments."""
        self.server, self.host, self.medium = server, host, medium
        self.retry_s = patience.retry_s
        self._name, self._datacentre, self._log = name, datacentre, log
        self._host_for_plans = secrets.token_hex(16) if medium == "tcp" else host
        """The host that the sender plans with. A receiver that shares no memory counts as a host of its own."""
        self.status = Guarded(ReceiverStatus())
        self.wakeups = Wakeups()
        """Notified after each change of `status` that somebody may wait for."""
        self.memory = ReceiverMemory(server, pool, self.status)
        self.sender = SenderConnection(self, address)
        self.broadcasts = BroadcastReceiver(server, limit_s=patience.limit_s, changed=self._take_broadcasts)
        self._plan: Plan | None = None
        """The sender's last plan; None while the sender is lost."""
        self._download: Download | None = None
        self._parent_at: float | None = None
        """The time to ask a parent again after one was left, by the server's clock."""
        self._refused = NOTHING
        """The serial of the newest version that was given up."""

    # For the server

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        """See `Service.handlers`."""
        return dict.fromkeys((GetManifest, GetSums, GetChunk), self.memory.chunk_server.answer)

    @property
    def next_deadline(self) -> float | None:
        """See `Service.next_deadline`."""
        return min((at for at in (self.sender.connect_at, self._parent_at) if at is not None), default=None)

    def tick(self, now: float) -> None:
        """See `Service.tick`."""
        if self.sender.connect_at is not None and self.sender.connect_at <= now:
            self.sender.connect()
        if self._parent_at is not None and self._parent_at <= now:
            self._parent_at = None
            self._advance()

    def gone(self, client: str) -> None:
        """See `Service.gone`."""
        self.memory.chunk_server.forget_client(client)

    def finish(self) -> None:
        """Tell the sender, and end `Server.run`."""
        self.sender.leave()
        self.broadcasts.close()
        self.server.stop()

    def join(self) -> None:
        """Wait for the work in progress after `finish`, and release other processes' memory. For another thread."""
        self.broadcasts.join()
        self.memory.join()

    # For the connection to the sender

    @property
    def progress(self) -> ReceiverProgress:
        """The progress of this receiver."""
        reading = NOTHING if self._download is None else self._download.offer.serial
        with self.status as status:
            received = NO_VERSION if status.received is None else status.received.manifest.version
            return ReceiverProgress(reading, received, status.installed, status.nbytes)

    def plan_question(self, epoch: int) -> GetPlan:
        """The question for the next plan, with this receiver's progress. `epoch`: that of its present plan, or 0."""
        backend = backend_of(self.medium)
        whereabouts = (self._host_for_plans, self._datacentre, self.server.endpoints)
        return GetPlan(epoch, self._name, *whereabouts, backend, self.progress)

    def follow(self, plan: Plan) -> None:
        """Follow this plan from now on."""
        with self.status as status:
            status.announced = max((offer.version for offer in plan.offers), default=NO_VERSION)
            status.error = None
        self._plan = plan
        self.broadcasts.hear(plan)
        self._advance()

    def sender_lost(self, error: SenderLost) -> None:
        """Report the loss to those that wait for weights. A download from another receiver goes on."""
        self._plan = None
        self.broadcasts.leave()
        remove_orphans(self.memory.pool.directory.parent)  # the sender may have been killed
        with self.status as status:
            status.error = error
        self.wakeups.notify()

    # For the download

    def placed(self, download: Download) -> None:
        """Serve the chunks of a download, which has found memory for its payload."""
        assert download.stored is not None, "it was placed"
        self.memory.give(download.stored)
        if self.broadcasts.first is not None:
            self.server.call(self._take_broadcasts)  # there is room now
        self._conclude(download)

    def arrived(self, download: Download, *, nbytes: int, by_broadcast: bool) -> None:
        """Handle the arrival of a chunk, `nbytes` of which came over the network."""
        with self.status as status:
            status.nbytes += nbytes
            status.bytes_broadcast += nbytes if by_broadcast else 0
        self.memory.chunk_server.answer_waiting()
        self._conclude(download)

    def ended(self, download: Download, end: DownloadEnd) -> None:
        """Handle the end of a download, or the loss of its parent.

        The download calls this in the middle of its own work, so the rest is done a little later.
        """
        self.server.call(lambda: self._on_end(download, end))

    # Versions

    def _advance(self) -> None:
        """Begin, continue or give up a download, as the plan says."""
        if self._plan is None:
            return
        offers = {offer.serial: offer for offer in self._plan.offers}
        newest = self._plan.offers[-1] if self._plan.offers else None
        download = self._download
        if download is not None:
            has_begun = download.stored is not None and download.stored.ready > 0
            is_newest = newest is not None and download.offer.serial == newest.serial
            if download.offer.serial not in offers or not (is_newest or has_begun):
                self._give_up(download)
        if self._download is None and newest is not None and newest.serial > max(self._refused, self._received()):
            self._download = Download(self, newest)
        if self._download is not None:
            self._download.offer = offers[self._download.offer.serial]
            self._follow_parent(self._download, self._plan)
            self._conclude(self._download)
        self._take_broadcasts()

    def _follow_parent(self, download: Download, plan: Plan) -> None:
        if self._parent_at is None:
            with self.status as status:
                status.parent = plan.parent
            download.follow(plan)

    def _advance_and_report(self) -> None:
        """Begin the newest version after another one, and report it: the sender keeps what is being fetched."""
        self._advance()
        self.sender.report_progress()

    def _take_broadcasts(self) -> None:
        """Take the broadcast chunks. They stay in their inbox until it is known whether and where they are needed."""
        while (received := self.broadcasts.first) is not None:
            download = self._download
            if download is not None and download.offer.serial == received.serial:
                if download.stored is None:
                    break
                download.take_broadcast(received)
            self.broadcasts.drop_first()
        if self._download is not None:
            self._download.go_on()

    def _received(self) -> int:
        """The serial of the newest version that is wholly here, or NOTHING."""
        with self.status as status:
            return NOTHING if status.received is None else status.received.manifest.serial

    def _conclude(self, download: Download) -> None:
        """Accept a version that is whole, once its seal is known."""
        stored, seal = download.stored, download.offer.seal
        if download is not self._download or stored is None or not stored.whole or seal is None:
            return
        if stored.seal() != seal:
            download.reset()
            return
        download.leave()
        self._download = None
        self.memory.keep(stored)
        self._emit(download)
        self.wakeups.notify()
        self.server.call(self._advance_and_report)

    def _on_end(self, download: Download, end: DownloadEnd) -> None:
        if download is not self._download:
            return
        if end is DownloadEnd.REFUSED:
            self._refuse(download)
        elif end is DownloadEnd.GONE and self._is_outdated(download):
            self._give_up(download)  # the parent has moved on: this receiver is too slow for each version
            self._advance_and_report()
        else:
            if end is DownloadEnd.PARENT_LOST and download.parent:
                self.sender.report_parent(download.parent)
            download.leave()
            self._parent_at = self.server.now + self.retry_s / 8  # by then there may be another plan

    def _refuse(self, download: Download) -> None:
        assert download.error is not None, "it says why it is refused"
        self._refused = download.offer.serial
        self._give_up(download)
        with self.status as status:
            status.refusal = (download.offer.version, download.error)
        self.wakeups.notify()
        self.sender.report_parent("")  # children that wait for it here then get it elsewhere
        self._advance_and_report()

    def _is_outdated(self, download: Download) -> bool:
        """Whether a newer version is on offer."""
        return self._plan is not None and any(offer.serial > download.offer.serial for offer in self._plan.offers)

    def _give_up(self, download: Download) -> None:
        download.leave()
        self._download = None
        self.memory.give_up(download.offer.serial)

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
