"""What a sender broadcasts: who is in the process group, and which versions go by it.

    membership changed, group broke ──▶ forming ──all have come──▶ formed ──version written──▶ broadcasting ──▶ formed
                                           └──one is lost, late──▶ no group, until a member or a version comes

One thing at a time, in a thread of its own: a group that is being formed, or in which something is broadcast, stays in
the plans until that has ended, so that every member hears of it. A version is promised to the group before it is
written, so that its members wait for it. Where there is no group, or it breaks, nothing is promised, and they fetch.

Who waits on whom: the thread on the members, in each call up to `limit_s`; nobody on the thread, but for `join`.
"""

import secrets
from collections.abc import Callable, Mapping
from socket import socket
from threading import Event

from tailrace.errors import WeightsError
from tailrace.transfer.queue.wire.server import Server
from tailrace.transfer.weights.jobs import Jobs
from tailrace.transfer.weights.media.process_group import ProcessGroup, address_towards, host_store, listen
from tailrace.transfer.weights.messages import NOTHING, Backend, Broadcast, Membership
from tailrace.transfer.weights.segments import Segment
from tailrace.transfer.weights.versions import Holding


class Broadcaster:
    """Used in the thread of `server`, but for `join`, and for `members`, `error` and the count, which others read."""

    def __init__(self, server: Server, *, host: str, limit_s: float, changed: Callable[[], None]) -> None:
        """No group yet. `host`: where members find this process. `changed`: called when plans are other ones now."""
        self._host, self._limit_s, self._changed = host, limit_s, changed
        self._jobs = Jobs(server, "broadcast of weights")
        self._wanted: dict[str, Backend] = {}
        self._memberships: dict[str, Membership] = {}
        """Of the group that there is, or that is being formed."""
        self._group: ProcessGroup | None = None
        """Once it is formed, and until it breaks."""
        self._is_busy = self._is_due = self._is_closed = self._is_written = False
        """The thread is at something; a group is to be formed; what was promised is written."""
        self._given_up = Event()
        """For the group that is being formed."""
        self._promised: Holding | None = None
        """Until it is being broadcast."""
        self._broadcasting: Holding | None = None
        self.bytes_broadcast = 0
        """Of payloads, once for all members."""
        self.error: WeightsError | None = None
        """Why there is no group, where one is wanted, or why the last broadcast failed."""

    # What plans say

    @property
    def members(self) -> list[str]:
        """Those of a group that is formed."""
        return list(self._memberships) if self._group is not None else []

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
        """Memory that is being broadcast."""
        return [] if self._broadcasting is None else [self._broadcasting.segment]

    # What happens

    def want(self, members: Mapping[str, Backend]) -> None:
        """These would be in a group; those are together in one that have the backend of the first."""
        backend = next(iter(members.values()), None)
        wanted = {client: each for client, each in members.items() if each == backend}
        if wanted == self._wanted:
            return
        self._wanted, self._is_due = wanted, True
        if not wanted.keys() >= self._memberships.keys():
            self._promised = None  # who has left would hold up the others
            self._given_up.set()
        self._look()

    def promise(self, holding: Holding) -> None:
        """A version is being written: members of the group, if there is one, shall wait for it."""
        self._is_written = False
        self._promised = None if self._group is None else holding
        self._is_due = self._is_due or (self._group is None and bool(self._wanted))  # try again
        self._look()

    def complete(self) -> None:
        """It is written."""
        self._is_written = True
        self._look()

    def withdraw(self) -> None:
        """It could not be written."""
        self._promised = None
        self._look()

    def close(self) -> None:
        """Begin nothing any more, and hang up as soon as what is going on lets it."""
        self._is_closed = True
        self._given_up.set()
        if self._group is not None and not self._is_busy:
            self._jobs.start(self._group.close, lambda _: None)

    def join(self) -> None:
        """After `close`, from another thread: wait for what is going on, which waits up to its limit."""
        self._jobs.join()

    def _look(self) -> None:
        """Begin what is to be done next."""
        if self._is_busy or self._is_closed:
            return
        if self._group is not None and self._promised is not None:
            if self._is_written:
                self._start_broadcast(self._group, self._promised)
        elif self._is_due:
            self._start_forming()

    def _start_forming(self) -> None:
        self._is_due, self._is_busy = False, True
        before, self._group, self._promised = self._group, None, None
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
        self._jobs.start(lambda: self._form(before, membership, listener or refused, given_up), self._on_formed)

    def _new_memberships(self, *, port: int) -> dict[str, Membership]:
        name, size = secrets.token_hex(8), len(self._wanted) + 1
        return {
            client: Membership(name, backend, self._host, port, rank, size)
            for rank, (client, backend) in enumerate(self._wanted.items(), start=1)
        }

    def _form(
        self,
        before: ProcessGroup | None,
        membership: Membership | None,
        listener: socket | WeightsError | None,
        given_up: Event,
    ) -> ProcessGroup | None:
        """In the jobs' thread. `listener`: or why there is none, where somebody wants a group."""
        if before is not None:
            before.close()
        if isinstance(listener, WeightsError):
            raise listener
        if membership is None or listener is None:
            return None
        store = host_store(listener, membership.name, limit_s=self._limit_s)
        address = address_towards(self._host)
        group = ProcessGroup(
            membership.backend, store, 0, membership.size, address=address, limit_s=self._limit_s, given_up=given_up
        )
        if self._is_closed:
            group.close()
        return group

    def _on_formed(self, outcome: ProcessGroup | WeightsError | None) -> None:
        self._is_busy = False
        if isinstance(outcome, WeightsError):
            self._memberships = {}
            if not self._given_up.is_set():  # else that is why, and no failure
                self.error = outcome
        else:
            self._group, self.error = outcome, None
        self._changed()
        self._look()

    def _start_broadcast(self, group: ProcessGroup, holding: Holding) -> None:
        self._is_busy, self._promised, self._broadcasting = True, None, holding
        self._changed()
        self._jobs.start(lambda: self._broadcast(group, holding), self._on_broadcast)

    def _broadcast(self, group: ProcessGroup, holding: Holding) -> None:
        """In the jobs' thread."""
        payload = holding.payload()
        try:
            for chunk in range(holding.manifest.chunks):
                if self._is_closed:
                    raise WeightsError("this sender of weights was closed")
                part = payload[holding.manifest.span(chunk)]
                self.bytes_broadcast += len(part)
                group.broadcast(part)
            group.meet()  # whoever has not heard of this one cannot miss it
        except WeightsError:
            group.close()
            raise

    def _on_broadcast(self, outcome: WeightsError | None) -> None:
        self._is_busy, self._broadcasting = False, None
        if outcome is not None:
            self._group, self._promised, self._memberships = None, None, {}
            self._is_due, self.error = bool(self._wanted), outcome
        self._changed()
        self._look()
