"""A sender's broadcasts: the members of the process group, and the versions that are sent through it.

    NO_GROUP ──members change, a version begins──▶ FORMING ──all come──▶ FORMED ──a version is written──▶ BROADCASTING
             ◀──one is lost, or late──────────────         ◀──members change──  ◀──all have it────────────
             ◀──it breaks, and another is formed──────────────────────────────────────────────────────────

One thing happens at a time, in a separate thread. A group that is being formed, or that receives a broadcast, stays in
the plans until that has ended, so that every member hears of it. A version is promised to the group before it is
written, so that its members wait for it. Without a group, or when it breaks, nothing is promised and receivers fetch.

Waiting: the thread waits for the members, in each call up to `limit_s`. Only `join` waits for the thread.
"""

import enum
import logging
import secrets
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from socket import socket
from threading import Event

from tailrace.errors import WeightsError
from tailrace.transfer.weights.media.process_group import ProcessGroup, address_towards, host_store, listen
from tailrace.transfer.weights.messages import NOTHING, Backend, Broadcast, Membership
from tailrace.transfer.weights.segments import Segment
from tailrace.transfer.weights.threads import Worker
from tailrace.transfer.weights.versions import StoredVersion
from tailrace.transfer.wire.server import Server

_log = logging.getLogger(__name__)


class BroadcastState(enum.Enum):
    """The current work. The diagram above shows what follows; CLOSED may follow each state, and is the last."""

    NO_GROUP = enum.auto()
    FORMING = enum.auto()
    """Also while only hanging up, when no receiver wants a group any more."""
    FORMED = enum.auto()
    BROADCASTING = enum.auto()
    CLOSED = enum.auto()


class Broadcaster:
    """Forms the group and broadcasts versions.

    Used in the thread of `server`, except for `join`. Other threads may read `members`, `error` and `bytes_broadcast`.
    """

    def __init__(self, server: Server, *, host: str, limit_s: float, changed: Callable[[], None]) -> None:
        """Start without a group. `host`: where members find this process. `changed`: called when plans change."""
        self._host, self._limit_s, self._changed = host, limit_s, changed
        self._worker = Worker(server, "broadcast of weights")
        self._state = BroadcastState.NO_GROUP
        self._wanted: dict[str, Backend] = {}
        self._tried: dict[str, Backend] = {}
        """The members of the last attempt to form a group; empty when another attempt with the same members is due."""
        self._memberships: dict[str, Membership] = {}
        """The members' places in the group that exists or is being formed."""
        self._group: ProcessGroup | None = None
        """Used in the worker's thread alone."""
        self._given_up = Event()
        """Set to give up the group that is being formed."""
        self._promised: StoredVersion | None = None
        """The version that is promised to the group, until its broadcast begins."""
        self._broadcasting: StoredVersion | None = None
        self.bytes_broadcast = 0
        """Bytes of payloads, counted once for all members."""
        self.error: WeightsError | None = None
        """The reason why there is no group although one is wanted, or why the last broadcast failed."""

    # For plans

    @property
    def members(self) -> list[str]:
        """The members of the group, once it is formed."""
        return list(self._memberships) if self._has_group else []

    def membership(self, client: str) -> Membership | None:
        """See `Plan.membership`."""
        return self._memberships.get(client)

    @property
    def promised(self) -> int:
        """See `Plan.promised`."""
        return NOTHING if self._promised is None else self._promised.manifest.serial

    @property
    def broadcast(self) -> Broadcast | None:
        """See `Plan.broadcast`."""
        if self._broadcasting is None:
            return None
        manifest = self._broadcasting.manifest
        return Broadcast(manifest.serial, manifest.nbytes, manifest.chunk_bytes, self._broadcasting.sums(0))

    @property
    def segments(self) -> list[Segment]:
        """The memory of versions that are being broadcast or will be."""
        return [stored.segment for stored in (self._broadcasting, self._promised) if stored is not None]

    # Changes

    def want(self, members: Mapping[str, Backend]) -> None:
        """Set the receivers that want a group. Those with the backend of the first form one together."""
        backend = next(iter(members.values()), None)
        wanted = {client: each for client, each in members.items() if each == backend}
        if wanted == self._wanted:
            return
        self._wanted = wanted
        if not wanted.keys() >= self._memberships.keys():
            self._promised = None  # a member that has left would hold up the others
            self._given_up.set()
        self._look()

    def promise(self, stored: StoredVersion) -> None:
        """Promise a version that is being written to the members of the group, if there is one: they wait for it."""
        self._promised = stored if self._has_group else None
        if self._state is BroadcastState.NO_GROUP:
            self._tried = {}
        self._look()

    def complete(self) -> None:
        """Broadcast the promised version, which is now written, as soon as the group is free."""
        self._look()

    def withdraw(self) -> None:
        """Break the promise of a version that could not be written."""
        self._promised = None
        self._look()

    def close(self) -> None:
        """Begin nothing more, and hang up as soon as the current work allows it."""
        self._state = BroadcastState.CLOSED
        self._given_up.set()
        self._worker.start(self._hang_up, lambda _: None)

    def join(self) -> None:
        """Wait after `close` for the current work, up to its limit. Called from another thread."""
        self._worker.join()

    @property
    def _has_group(self) -> bool:
        return self._state in (BroadcastState.FORMED, BroadcastState.BROADCASTING)

    def _look(self) -> None:
        """Begin the next piece of work, unless one is in progress."""
        if self._state is BroadcastState.FORMED and self._promised is not None:
            if self._promised.whole:
                self._start_broadcast(self._promised)
        elif self._state in (BroadcastState.NO_GROUP, BroadcastState.FORMED) and self._wanted != self._tried:
            self._start_forming()

    def _start_forming(self) -> None:
        self._state, self._tried = BroadcastState.FORMING, self._wanted
        self._given_up = given_up = Event()
        self._memberships, listener, refused = {}, None, None
        try:
            if self._wanted:
                listener = listen(self._host)
                self._memberships = self._new_memberships(port=listener.getsockname()[1])
        except WeightsError as error:
            refused = error
        self._changed()
        membership = next(iter(self._memberships.values()), None)
        self._worker.start(lambda: self._form(membership, listener or refused, given_up), self._on_formed)

    def _new_memberships(self, *, port: int) -> dict[str, Membership]:
        name, size = secrets.token_hex(8), len(self._wanted) + 1
        return {
            client: Membership(name, backend, self._host, port, rank, size)
            for rank, (client, backend) in enumerate(self._wanted.items(), start=1)
        }

    def _on_formed(self, outcome: WeightsError | None) -> None:
        if self._state is BroadcastState.CLOSED:
            return
        if outcome is None:
            self.error = None
        else:
            self._memberships = {}
            if not self._given_up.is_set():  # else it was given up, which is no failure
                self.error = outcome
        self._state = BroadcastState.FORMED if self._memberships else BroadcastState.NO_GROUP
        self._changed()
        self._look()

    def _start_broadcast(self, stored: StoredVersion) -> None:
        self._state, self._promised, self._broadcasting = BroadcastState.BROADCASTING, None, stored
        self._changed()
        self._worker.start(lambda: self._broadcast(stored), self._on_broadcast)

    def _on_broadcast(self, outcome: WeightsError | None) -> None:
        if self._state is BroadcastState.CLOSED:
            return
        self._state, self._broadcasting = BroadcastState.FORMED, None
        if outcome is not None:
            self._state, self._promised, self._memberships, self._tried = BroadcastState.NO_GROUP, None, {}, {}
            self.error = outcome
        self._changed()
        self._look()

    # In the worker's thread

    def _form(self, membership: Membership | None, listener: socket | WeightsError | None, given_up: Event) -> None:
        """Form a group. `listener`: None if no group is wanted; the error if it could not be opened."""
        with ExitStack() as stack:
            if isinstance(listener, socket):
                stack.enter_context(listener)  # until the store has it
            self._hang_up()
            if isinstance(listener, WeightsError):
                raise listener
            if membership is None or listener is None:
                return
            store = host_store(listener, membership.name, limit_s=self._limit_s)
        address = address_towards(self._host)
        self._group = ProcessGroup(
            membership.backend, store, 0, membership.size, address=address, limit_s=self._limit_s, given_up=given_up
        )

    def _broadcast(self, stored: StoredVersion) -> None:
        assert self._group is not None, "it was formed"
        payload = stored.payload()
        try:
            for chunk in range(stored.manifest.chunks):
                if self._state is BroadcastState.CLOSED:
                    raise WeightsError("this sender of weights was closed")
                part = payload[stored.manifest.span(chunk)]
                self.bytes_broadcast += len(part)
                self._group.broadcast(part)
            self._group.meet()  # waits for members that have not heard of this broadcast yet
        except WeightsError:
            self._hang_up()
            raise

    def _hang_up(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            try:
                group.close()
            except WeightsError as error:  # the old group is useless, and members of the next one are on their way
                _log.warning("a process group for weights could not be ended: %s", error)
