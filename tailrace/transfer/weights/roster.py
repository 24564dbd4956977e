"""What a sender's thread does: it knows who is there, plans who gets weights from whom, and gives them.

    receiver ──Follow──▶ roster: joined, or seen again ──▶ plan ──▶ Plan to everybody whose plan is another one now
    silent, Leave, Complain ──▶ plan again          those that a broadcast can reach ──▶ Broadcaster

Who waits on whom: `WeightSender.installed` on the receivers that are there, and those on their turns; nobody else here
on anybody.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tailrace.planning.broadcast import ROOT, Site, broadcast_tree
from tailrace.transfer.weights.address import WeightsAddress, host_of, is_far_reaching
from tailrace.transfer.weights.broadcast.broadcaster import Broadcaster
from tailrace.transfer.weights.messages import (
    NOTHING,
    Backend,
    Closed,
    Complain,
    Describe,
    EndTurn,
    Fetch,
    Follow,
    Leave,
    Offer,
    Plan,
    Progress,
    Report,
    Standing,
    TakeTurn,
)
from tailrace.transfer.weights.segments import Segment
from tailrace.transfer.weights.shelf import Shelf
from tailrace.transfer.weights.threads import Wakeups
from tailrace.transfer.weights.turns import TurnLine
from tailrace.transfer.weights.versions import Holding, sum_of
from tailrace.transfer.wire.frames import Reply
from tailrace.transfer.wire.messages import Accepted, Message
from tailrace.transfer.wire.server import Handler, Incoming, Server, Service, Ticket

_FAN_OUT = 2
"""At most so many receivers of a datacentre get weights from one process over the network."""
_OLDER = 2
"""At most so many versions are kept beside the newest, for the receivers that are at them: those that began first."""


@dataclass(slots=True)
class Member:
    """A receiver that is there."""

    site: Site
    planned: Site
    """The same, but while it is distrusted."""
    name: str
    """For people."""
    endpoints: list[str]
    backend: Backend | None
    """See `Follow.backend`."""
    standing: Standing
    told: int = NOTHING
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
        return {self.told, self.standing.reading}


class Roster(Service):
    """Everything is called in the thread of `server`, but for `members` and `wakeups`."""

    def __init__(self, server: Server, address: WeightsAddress, *, datacentre: str, limit_s: float) -> None:
        """Nobody is there, and there is no version."""
        self.server = server
        self._limit_s = limit_s
        self.address = address
        self.shelf = Shelf(server)
        self.wakeups = Wakeups()
        self.members: dict[str, Member] = {}
        """By the names that the wire gives them, in the order in which they came."""
        self.broadcaster = Broadcaster(server, host=host_of(address), limit_s=limit_s, changed=self._regrouped)
        self._turns = TurnLine(lambda ticket: server.reply(ticket, Accepted()))
        self._root = Site(name=ROOT, host=address.host, datacentre=datacentre)
        self._epoch = 1
        self._offers: list[Offer] = []
        self._parents: dict[str, str] = {}

    # For the server

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        """See `Service.handlers`."""
        return {
            Describe: self.shelf.answer,
            Progress: self.shelf.answer,
            Fetch: self.shelf.answer,
            Follow: self._follow,
            Report: self._report,
            Complain: self._complain,
            Leave: self._leave,
            TakeTurn: self._take_turn,
            EndTurn: self._end_turn,
        }

    @property
    def next_deadline(self) -> float | None:
        """See `Service.next_deadline`."""
        return None

    def tick(self, now: float) -> None:
        """See `Service.tick`: nothing is ever due."""

    def gone(self, client: str) -> None:
        """See `Service.gone`."""
        self.shelf.leave(client)
        self._turns.leave(client)
        if self.members.pop(client, None) is not None:
            self._plan()
            self.wakeups.notify()

    def _report(self, incoming: Incoming) -> Reply:
        self._hear(incoming.ticket.client, incoming.message.standing)
        return Reply(Accepted())

    def _complain(self, incoming: Incoming) -> Reply:
        client = incoming.ticket.client
        self._distrust(client, incoming.message.parent or client)
        return Reply(Accepted())

    def _leave(self, incoming: Incoming) -> Reply:
        self.gone(incoming.ticket.client)
        return Reply(Accepted())

    def _take_turn(self, incoming: Incoming) -> None:
        self._turns.ask(incoming.message.turn, incoming.ticket)

    def _end_turn(self, incoming: Incoming) -> Reply:
        self._turns.end(incoming.message.turn)
        return Reply(Accepted())

    def _follow(self, incoming: Incoming) -> None:
        ticket, follow = incoming.ticket, incoming.message
        member = self.members.get(ticket.client)
        if member is None:
            relays = any(map(is_far_reaching, follow.endpoints)) or follow.host == self.address.host
            site = Site(name=ticket.client, host=follow.host, datacentre=self._datacentre(follow), relays=relays)
            facts = (follow.name, follow.endpoints, follow.backend, follow.standing)
            self._replace_former(follow)
            member = self.members[ticket.client] = Member(site, site, *facts)
            self._plan()
        member.ticket = ticket
        member.epoch = follow.epoch
        self._hear(ticket.client, follow.standing)
        self._tell(member)

    def _replace_former(self, follow: Follow) -> None:
        """One that has taken this sender for lost comes by another connection, and would be told to fetch from itself.

        Its turns stay until the server misses the former connection: it asks for them again, and keeps its place.
        """
        who = (follow.name, follow.endpoints)
        for client in [client for client, member in self.members.items() if (member.name, member.endpoints) == who]:
            del self.members[client]
            self.shelf.leave(client)

    def _datacentre(self, follow: Follow) -> str:
        """One host is in one datacentre: that of the first from there."""
        known = [self._root, *(member.site for member in self.members.values())]
        return next((site.datacentre for site in known if site.host == follow.host), follow.datacentre)

    def _hear(self, client: str, standing: Standing) -> None:
        member = self.members.get(client)
        if member is not None:
            member.standing = standing
            member.told = NOTHING
            self.wakeups.notify()

    def _distrust(self, child: str, parent: str) -> None:
        """A member cannot reach another one: for a while nobody gets weights from that over the network.

        Nor do those on its host by shared memory, if the child is one of them. But it may be the child that was cut
        off: so the distrust ends, after twice as long each time.
        """
        accuser, accused = self.members.get(child), self.members.get(parent)
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
        for member in self.members.values():
            if member.trusted_at <= self.server.now:
                member.planned = member.site

    # Versions

    def begin(self, holding: Holding) -> None:
        """A version is being written: it can be fetched from now on, also from those whose distrust has ended."""
        manifest = holding.manifest
        self._offers.append(Offer(manifest.serial, manifest.version, sum_of(holding.encoded), None))
        self.shelf.put(holding)
        self.broadcaster.promise(holding)
        self._trust_again()
        self._plan()

    def complete(self, seal: bytes) -> None:
        """It is written."""
        last = self._offers[-1]
        self._offers[-1] = Offer(last.serial, last.version, last.manifest, seal)
        self.shelf.look()
        self.broadcaster.complete()
        self._announce()

    def withdraw(self, serial: int) -> None:
        """It could not be written, or not even begun."""
        if self._offers and self._offers[-1].serial == serial:
            self.shelf.drop([self._offers.pop().serial])
            self.broadcaster.withdraw()
            self._announce()

    def make_room(self) -> list[Segment]:
        """Keep of the versions the newest, and those that somebody is at: their memory, which is not used again."""
        reading = set().union(*(member.reading for member in self.members.values()))
        older = [offer for offer in self._offers[:-1] if offer.serial in reading][:_OLDER]
        kept = [*older, *self._offers[-1:]]
        self.shelf.drop({offer.serial for offer in self._offers} - {offer.serial for offer in kept})
        self._offers = kept
        return [*self.shelf.segments, *self.broadcaster.segments]

    def finish(self) -> None:
        """Tell everybody that it is over, and end `Server.run`."""
        self.broadcaster.close()
        for member in self.members.values():
            if member.ticket is not None:
                self.server.reply(member.ticket, Closed())
        self.server.stop()

    # Plans

    def parent(self, member: Member) -> str:
        """The name that the wire gives it; `ROOT` for the sender."""
        return self._parents.get(member.site.name, ROOT)

    def _plan(self) -> None:
        sites = [member.planned for member in self.members.values()]
        self._parents = broadcast_tree(self._root, sites, fan_out=_FAN_OUT)
        here = self._root.datacentre  # a group would cross a slow link once for each member beyond it
        near = {name: member for name, member in self.members.items() if member.site.datacentre == here}
        self.broadcaster.want({name: member.backend for name, member in near.items() if member.backend})
        self._announce()

    def _regrouped(self) -> None:
        self._announce()
        self.wakeups.notify()

    def _announce(self) -> None:
        self._epoch += 1
        for member in self.members.values():
            self._tell(member)

    def _tell(self, member: Member) -> None:
        """Answer a member that waits, where it does not know how things are."""
        if member.ticket is None or member.epoch == self._epoch:
            return
        parent = self._parents[member.site.name]
        if parent == ROOT:
            endpoints, host = self.address.endpoints, self.address.host
        else:
            endpoints, host = self.members[parent].endpoints, self.members[parent].site.host
        broadcaster, membership = self.broadcaster, self.broadcaster.membership(member.site.name)
        promised, broadcast = (NOTHING, None) if membership is None else (broadcaster.promised, broadcaster.broadcast)
        plan = Plan(self._epoch, self._offers, parent, endpoints, host, membership, promised, broadcast)
        if self._offers:
            member.told = self._offers[-1].serial
        member.epoch = self._epoch
        ticket, member.ticket = member.ticket, None
        self.server.reply(ticket, plan)
