"""The service in a sender's thread: it knows the receivers, plans who gets weights from whom, and serves them.

    receiver ──GetPlan──▶ joined, or seen again ──▶ plan ──▶ Plan to every receiver whose plan is another one now
    silent, Leave, ReportParent ──▶ plan again      those that a broadcast can reach ──▶ Broadcaster

Waiting: `WeightSender.installed` waits for the connected receivers, and a receiver for its turn. Nothing else here
waits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tailrace.planning.broadcast import FAN_OUT, ROOT, Site, broadcast_tree
from tailrace.transfer.weights.address import WeightsAddress, host_of, is_far_reaching
from tailrace.transfer.weights.broadcast.broadcaster import Broadcaster
from tailrace.transfer.weights.chunk_server import ChunkServer
from tailrace.transfer.weights.install_turns import InstallTurns
from tailrace.transfer.weights.messages import (
    NOTHING,
    Backend,
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
    VersionOffer,
)
from tailrace.transfer.weights.segments import Segment
from tailrace.transfer.weights.threads import Wakeups
from tailrace.transfer.weights.versions import StoredVersion, sum_of
from tailrace.transfer.wire.frames import Reply
from tailrace.transfer.wire.messages import Accepted, Message
from tailrace.transfer.wire.server import Handler, Incoming, Server, Service, Ticket

_OLDER = 2
"""The most versions that are kept beside the newest, for receivers that still fetch them: those that began first."""


@dataclass(slots=True)
class KnownReceiver:
    """A connected receiver."""

    site: Site
    planned: Site
    """The same as `site`, except while the receiver is distrusted."""
    name: str
    """A name for people to read."""
    endpoints: list[str]
    backend: Backend | None
    """See `GetPlan.backend`."""
    progress: ReceiverProgress
    announced: int = NOTHING
    """The serial of the newest version in the last plan that it got: it may have begun that version."""
    ticket: Ticket | None = None
    epoch: int = 0
    """The epoch of the plan that it knows."""
    accusations: int = 0
    """The number of times that it was distrusted."""
    trusted_at: float = 0.0
    """The time when the distrust ends, by the server's clock."""

    @property
    def is_distrusted(self) -> bool:
        """Whether another receiver could not reach it."""
        return self.planned != self.site

    @property
    def reading(self) -> set[int]:
        """The serials of versions that it may be fetching."""
        return {self.announced, self.progress.reading}


class SenderService(Service):
    """The sender's side of the transfer. Used in the thread of `server`, except for `receivers` and `wakeups`."""

    def __init__(self, server: Server, address: WeightsAddress, *, datacentre: str, limit_s: float) -> None:
        """Start without receivers and without versions."""
        self.server = server
        self._limit_s = limit_s
        self.address = address
        self.chunk_server = ChunkServer(server)
        self.wakeups = Wakeups()
        self.receivers: dict[str, KnownReceiver] = {}
        """The connected receivers by the names that the wire gives them, in the order in which they came."""
        self.broadcaster = Broadcaster(server, host=host_of(address), limit_s=limit_s, changed=self._on_group_changed)
        self._turns = InstallTurns(lambda ticket: server.reply(ticket, Accepted()))
        self._root = Site(name=ROOT, host=address.host, datacentre=datacentre)
        self._epoch = 1
        self._offers: list[VersionOffer] = []
        self._parents: dict[str, str] = {}

    # For the server

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        """See `Service.handlers`."""
        return {
            GetManifest: self.chunk_server.answer,
            GetSums: self.chunk_server.answer,
            GetChunk: self.chunk_server.answer,
            GetPlan: self._on_get_plan,
            ReportProgress: self._on_report_progress,
            ReportParent: self._on_report_parent,
            Leave: self._on_leave,
            TakeTurn: self._on_take_turn,
            EndTurn: self._on_end_turn,
        }

    @property
    def next_deadline(self) -> float | None:
        """See `Service.next_deadline`."""
        return None

    def tick(self, now: float) -> None:
        """Do nothing, since nothing is ever due; see `Service.tick`."""

    def gone(self, client: str) -> None:
        """See `Service.gone`."""
        self.chunk_server.forget_client(client)
        self._turns.forget_client(client)
        if self.receivers.pop(client, None) is not None:
            self._plan()
            self.wakeups.notify()

    def _on_report_progress(self, incoming: Incoming) -> Reply:
        self._note_progress(incoming.ticket.client, incoming.message.progress)
        return Reply(Accepted())

    def _on_report_parent(self, incoming: Incoming) -> Reply:
        client = incoming.ticket.client
        self._distrust(client, incoming.message.parent or client)
        return Reply(Accepted())

    def _on_leave(self, incoming: Incoming) -> Reply:
        self.gone(incoming.ticket.client)
        return Reply(Accepted())

    def _on_take_turn(self, incoming: Incoming) -> None:
        self._turns.request(incoming.message.turn, incoming.ticket)

    def _on_end_turn(self, incoming: Incoming) -> Reply:
        self._turns.end(incoming.message.turn)
        return Reply(Accepted())

    def _on_get_plan(self, incoming: Incoming) -> None:
        ticket, question = incoming.ticket, incoming.message
        receiver = self.receivers.get(ticket.client)
        if receiver is None:
            relays = any(map(is_far_reaching, question.endpoints)) or question.host == self.address.host
            site = Site(name=ticket.client, host=question.host, datacentre=self._datacentre(question), relays=relays)
            facts = (question.name, question.endpoints, question.backend, question.progress)
            self._replace_former(question)
            receiver = self.receivers[ticket.client] = KnownReceiver(site, site, *facts)
            self._plan()
        receiver.ticket = ticket
        receiver.epoch = question.epoch
        self._note_progress(ticket.client, question.progress)
        self._answer_plan(receiver)

    def _replace_former(self, question: GetPlan) -> None:
        """Forget the former connection of a receiver that took this sender for lost: it would be its own parent.

        Its turns stay until the server misses the former connection: the receiver asks again, and keeps its place.
        """
        who = (question.name, question.endpoints)
        for client in [
            client for client, receiver in self.receivers.items() if (receiver.name, receiver.endpoints) == who
        ]:
            del self.receivers[client]
            self.chunk_server.forget_client(client)

    def _datacentre(self, question: GetPlan) -> str:
        """The receiver's datacentre. A host is in one datacentre: that of the first process on it."""
        sites = [self._root, *(receiver.site for receiver in self.receivers.values())]
        return next((site.datacentre for site in sites if site.host == question.host), question.datacentre)

    def _note_progress(self, client: str, progress: ReceiverProgress) -> None:
        receiver = self.receivers.get(client)
        if receiver is not None:
            receiver.progress = progress
            receiver.announced = NOTHING
            self.wakeups.notify()

    def _distrust(self, child: str, parent: str) -> None:
        """Distrust a parent that a child cannot reach: for a while no receiver gets weights from it over the network.

        If the child is on the parent's host, no receiver there gets them by shared memory either. But the child may be
        the one that was cut off. So the distrust ends, after twice as long each time.
        """
        accuser, accused = self.receivers.get(child), self.receivers.get(parent)
        if accuser is None or accused is None:
            return
        host = parent if accuser.site.host == accused.site.host else accused.planned.host
        planned = replace(accused.planned, host=host, relays=False)
        if planned != accused.planned:
            if not accused.is_distrusted:
                accused.accusations += 1
                accused.trusted_at = self.server.now + self._limit_s * 2**accused.accusations
            accused.planned = planned
            self._plan()

    def _trust_again(self) -> None:
        for receiver in self.receivers.values():
            if receiver.trusted_at <= self.server.now:
                receiver.planned = receiver.site

    # Versions

    def begin(self, stored: StoredVersion) -> None:
        """Offer a version that is being written. Receivers whose distrust has ended may relay again."""
        manifest = stored.manifest
        self._offers.append(VersionOffer(manifest.serial, manifest.version, sum_of(stored.encoded), None))
        self.chunk_server.add(stored)
        self.broadcaster.promise(stored)
        self._trust_again()
        self._plan()

    def complete(self, seal: bytes) -> None:
        """Announce the seal of the version, which is now written."""
        last = self._offers[-1]
        self._offers[-1] = VersionOffer(last.serial, last.version, last.manifest, seal)
        self.chunk_server.answer_waiting()
        self.broadcaster.complete()
        self._announce()

    def withdraw(self, serial: int) -> None:
        """Withdraw a version that could not be written, or whose writing did not begin."""
        if self._offers and self._offers[-1].serial == serial:
            self.chunk_server.drop([self._offers.pop().serial])
            self.broadcaster.withdraw()
            self._announce()

    def make_room(self) -> list[Segment]:
        """Drop all versions but the newest and those that are being fetched; return the memory that is still in use."""
        reading = set().union(*(receiver.reading for receiver in self.receivers.values()))
        older = [offer for offer in self._offers[:-1] if offer.serial in reading][:_OLDER]
        kept = [*older, *self._offers[-1:]]
        self.chunk_server.drop({offer.serial for offer in self._offers} - {offer.serial for offer in kept})
        self._offers = kept
        return [*self.chunk_server.segments, *self.broadcaster.segments]

    def finish(self) -> None:
        """Tell all receivers that the sender is closed, and end `Server.run`."""
        self.broadcaster.close()
        for receiver in self.receivers.values():
            if receiver.ticket is not None:
                self.server.reply(receiver.ticket, SenderClosed())
        self.server.stop()

    # Plans

    def parent(self, receiver: KnownReceiver) -> str:
        """The wire's name for the parent of a receiver; `ROOT` for the sender."""
        return self._parents.get(receiver.site.name, ROOT)

    def _plan(self) -> None:
        sites = [receiver.planned for receiver in self.receivers.values()]
        self._parents = broadcast_tree(self._root, sites, fan_out=FAN_OUT)
        here = self._root.datacentre  # a group would cross a slow link once for each receiver beyond it
        near = {name: receiver for name, receiver in self.receivers.items() if receiver.site.datacentre == here}
        self.broadcaster.want({name: receiver.backend for name, receiver in near.items() if receiver.backend})
        self._announce()

    def _on_group_changed(self) -> None:
        self._announce()
        self.wakeups.notify()

    def _announce(self) -> None:
        self._epoch += 1
        for receiver in self.receivers.values():
            self._answer_plan(receiver)

    def _answer_plan(self, receiver: KnownReceiver) -> None:
        """Answer a waiting receiver that does not know the current plan."""
        if receiver.ticket is None or receiver.epoch == self._epoch:
            return
        parent = self._parents[receiver.site.name]
        if parent == ROOT:
            endpoints, host = self.address.endpoints, self.address.host
        else:
            endpoints, host = self.receivers[parent].endpoints, self.receivers[parent].site.host
        broadcaster, membership = self.broadcaster, self.broadcaster.membership(receiver.site.name)
        promised, broadcast = (NOTHING, None) if membership is None else (broadcaster.promised, broadcaster.broadcast)
        plan = Plan(self._epoch, self._offers, parent, endpoints, host, membership, promised, broadcast)
        if self._offers:
            receiver.announced = self._offers[-1].serial
        receiver.epoch = self._epoch
        ticket, receiver.ticket = receiver.ticket, None
        self.server.reply(ticket, plan)
