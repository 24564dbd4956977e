"""What a sender's thread does: it knows the receivers, plans who gets weights from whom, and gives them.

    receiver ──GetPlan──▶ joined, or seen again ──▶ plan ──▶ Plan to every receiver whose plan is another one now
    silent, Leave, ReportParent ──▶ plan again      those that a broadcast can reach ──▶ Broadcaster

Who waits on whom: `WeightSender.installed` on the receivers that are there, and those on their turns; nobody else here
on anybody.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tailrace.planning.broadcast import ROOT, Site, broadcast_tree
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

_FAN_OUT = 2
"""At most so many receivers of a datacentre get weights from one process over the network."""
_OLDER = 2
"""At most so many versions are kept beside the newest, for the receivers that are at them: those that began first."""


@dataclass(slots=True)
class KnownReceiver:
    """A receiver that is there."""

    site: Site
    planned: Site
    """The same, but while it is distrusted."""
    name: str
    """For people."""
    endpoints: list[str]
    backend: Backend | None
    """See `GetPlan.backend`."""
    progress: ReceiverProgress
    announced: int = NOTHING
    """The serial of the newest version that was announced to it last: it may have begun it."""
    ticket: Ticket | None = None
    epoch: int = 0
    """Of what it knows."""
    accusations: int = 0
    """How often it was distrusted."""
    trusted_at: float = 0.0
    """When that ends."""

    @property
    def is_distrusted(self) -> bool:
        """Whether somebody could not reach it."""
        return self.planned != self.site

    @property
    def reading(self) -> set[int]:
        """Serials that it may be at."""
        return {self.announced, self.progress.reading}


class SenderService(Service):
    """Everything is called in the thread of `server`, but for `receivers` and `wakeups`."""

    def __init__(self, server: Server, address: WeightsAddress, *, datacentre: str, limit_s: float) -> None:
        """Nobody is there, and there is no version."""
        self.server = server
        self._limit_s = limit_s
        self.address = address
        self.chunk_server = ChunkServer(server)
        self.wakeups = Wakeups()
        self.receivers: dict[str, KnownReceiver] = {}
        """By the names that the wire gives them, in the order in which they came."""
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
        """See `Service.tick`: nothing is ever due."""

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
        """A receiver that took this sender for lost has another connection now, and would be its own parent.

        Its turns stay until the server misses the former connection: it asks for them again, and keeps its place.
        """
        who = (question.name, question.endpoints)
        for client in [
            client for client, receiver in self.receivers.items() if (receiver.name, receiver.endpoints) == who
        ]:
            del self.receivers[client]
            self.chunk_server.forget_client(client)

    def _datacentre(self, question: GetPlan) -> str:
        """One host is in one datacentre: that of the first from there."""
        sites = [self._root, *(receiver.site for receiver in self.receivers.values())]
        return next((site.datacentre for site in sites if site.host == question.host), question.datacentre)

    def _note_progress(self, client: str, progress: ReceiverProgress) -> None:
        receiver = self.receivers.get(client)
        if receiver is not None:
            receiver.progress = progress
            receiver.announced = NOTHING
            self.wakeups.notify()

    def _distrust(self, child: str, parent: str) -> None:
        """A receiver cannot reach another one: for a while nobody gets weights from that over the network.

        Nor do those on its host by shared memory, if the child is one of them. But it may be the child that was cut
        off: so the distrust ends, after twice as long each time.
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
        """A version is being written: it can be fetched from now on, also from those whose distrust has ended."""
        manifest = stored.manifest
        self._offers.append(VersionOffer(manifest.serial, manifest.version, sum_of(stored.encoded), None))
        self.chunk_server.add(stored)
        self.broadcaster.promise(stored)
        self._trust_again()
        self._plan()

    def complete(self, seal: bytes) -> None:
        """It is written."""
        last = self._offers[-1]
        self._offers[-1] = VersionOffer(last.serial, last.version, last.manifest, seal)
        self.chunk_server.answer_waiting()
        self.broadcaster.complete()
        self._announce()

    def withdraw(self, serial: int) -> None:
        """It could not be written, or not even begun."""
        if self._offers and self._offers[-1].serial == serial:
            self.chunk_server.drop([self._offers.pop().serial])
            self.broadcaster.withdraw()
            self._announce()

    def make_room(self) -> list[Segment]:
        """Keep of the versions the newest, and those that somebody is at: their memory, which is not used again."""
        reading = set().union(*(receiver.reading for receiver in self.receivers.values()))
        older = [offer for offer in self._offers[:-1] if offer.serial in reading][:_OLDER]
        kept = [*older, *self._offers[-1:]]
        self.chunk_server.drop({offer.serial for offer in self._offers} - {offer.serial for offer in kept})
        self._offers = kept
        return [*self.chunk_server.segments, *self.broadcaster.segments]

    def finish(self) -> None:
        """Tell everybody that it is over, and end `Server.run`."""
        self.broadcaster.close()
        for receiver in self.receivers.values():
            if receiver.ticket is not None:
                self.server.reply(receiver.ticket, SenderClosed())
        self.server.stop()

    # Plans

    def parent(self, receiver: KnownReceiver) -> str:
        """The name that the wire gives it; `ROOT` for the sender."""
        return self._parents.get(receiver.site.name, ROOT)

    def _plan(self) -> None:
        sites = [receiver.planned for receiver in self.receivers.values()]
        self._parents = broadcast_tree(self._root, sites, fan_out=_FAN_OUT)
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
        """Answer a receiver that waits, where it does not know how things are."""
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
