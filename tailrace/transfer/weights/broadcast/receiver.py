"""A receiver's part in its sender's broadcasts; see `broadcaster`.

    Plan.membership ──another group──▶ enter it
    Plan.broadcast ──▶ chunk by chunk, each with its sum ──▶ inbox ──▶ download

A separate thread takes part in every broadcast, whether its version is wanted here or not: the other members wait for
it. It touches no memory of versions. Chunks that have come lie in a few buffers until the receiver's thread has looked
at them.

Waiting: the thread waits for the other members, and for the receiver's thread when all buffers are full, each time up
to `limit_s`. Only `join` waits for the thread.
"""

import queue
from collections import deque
from collections.abc import Callable
from threading import Event
from typing import NamedTuple

import torch

from tailrace.errors import WeightsError
from tailrace.transfer.weights.media.process_group import ProcessGroup, address_towards, reach_store
from tailrace.transfer.weights.messages import NOTHING, Broadcast, Membership, Plan
from tailrace.transfer.weights.threads import Worker
from tailrace.transfer.weights.versions import packed_sums, sum_of
from tailrace.transfer.wire.server import Server

_BUFFERS = 4
"""The number of buffers, each for one chunk."""


class BroadcastChunk(NamedTuple):
    """A chunk that was broadcast."""

    serial: int
    chunk: int
    buffer: torch.Tensor
    data: memoryview
    sum: bytes
    """The sum that `data` must have."""
    is_right: bool
    """Whether `data` has that sum."""


class BroadcastReceiver:
    """Takes part in broadcasts. Used in the thread of `server`, except for `join`."""

    def __init__(self, server: Server, *, limit_s: float, changed: Callable[[], None]) -> None:
        """Start outside any group. `changed`: called when `first` changes or a version is no longer expected."""
        self._server, self._limit_s, self._changed = server, limit_s, changed
        self._worker = Worker(server, "broadcast of weights")
        self._membership: Membership | None = None
        """The membership that the last plan gave."""
        self._given_up = Event()
        """Set to give up the group that is being entered."""
        self._is_in = False
        """Whether this is in the group, or entering it. A group that broke is never entered again."""
        self._group: ProcessGroup | None = None
        """Used in the worker's thread alone."""
        self._announced: set[int] = set()
        self._begun = self._ended = NOTHING
        """The serials of the last broadcasts that have begun and ended here."""
        self._is_closed = False
        self._inbox: deque[BroadcastChunk] = deque()
        self._free: queue.Queue[torch.Tensor | None] = queue.Queue()
        for _ in range(_BUFFERS):
            self._free.put(None)

    @property
    def first(self) -> BroadcastChunk | None:
        """The first chunk in the inbox; call `drop_first` after use."""
        return self._inbox[0] if self._inbox else None

    def drop_first(self) -> None:
        """Drop the first chunk. Its buffer is reused."""
        self._free.put(self._inbox.popleft().buffer)

    def expects(self, serial: int) -> bool:
        """Whether chunks of this version will come, or lie in the inbox."""
        is_coming = serial in self._announced or serial == self._begun
        is_here = any(received.serial == serial for received in self._inbox)
        return is_here or (self._is_in and is_coming and serial > self._ended)

    def hear(self, plan: Plan) -> None:
        """Enter the plan's group, and take part in its broadcast."""
        if plan.membership != self._membership:
            self._enter(plan.membership)
        self._announced = {plan.promised} | (set() if plan.broadcast is None else {plan.broadcast.serial})
        if self._is_in and plan.broadcast is not None and plan.broadcast.serial > self._begun:
            self._begin(plan.broadcast)

    def leave(self) -> None:
        """Leave the group, if there is one."""
        if self._membership is not None:
            self._enter(None)

    def close(self) -> None:
        """Take part in nothing more, and hang up as soon as the current work allows it."""
        self._is_closed = True
        while self._inbox:
            self.drop_first()
        self.leave()

    def join(self) -> None:
        """Wait after `close` for the current work, up to its limit. Called from another thread."""
        self._worker.join()

    def _enter(self, membership: Membership | None) -> None:
        self._given_up.set()
        self._given_up = given_up = Event()
        self._membership, self._is_in = membership, membership is not None

        def then(outcome: WeightsError | None) -> None:
            self._on_ended(membership, outcome)

        self._worker.start(lambda: self._join_group(membership, given_up), then)

    def _begin(self, broadcast: Broadcast) -> None:
        self._begun = broadcast.serial
        membership = self._membership

        def then(outcome: WeightsError | None) -> None:
            self._ended = broadcast.serial
            self._on_ended(membership, outcome)
            self._changed()

        self._worker.start(lambda: self._receive(broadcast), then)

    def _on_ended(self, membership: Membership | None, outcome: WeightsError | None) -> None:
        """Handle the end of work in the group of this membership; a failure ends the membership."""
        if outcome is not None and membership is self._membership:
            self._is_in = False
            self._changed()

    # In the worker's thread

    def _join_group(self, membership: Membership | None, given_up: Event) -> None:
        self._hang_up()
        if membership is not None and not given_up.is_set():
            store = reach_store(membership.host, membership.port, membership.name, limit_s=self._limit_s)
            address = address_towards(membership.host)
            self._group = ProcessGroup(
                membership.backend,
                store,
                membership.rank,
                membership.size,
                address=address,
                limit_s=self._limit_s,
                given_up=given_up,
            )

    def _receive(self, broadcast: Broadcast) -> None:
        try:
            if self._group is None:
                raise WeightsError("there is no group to get weights from")
            for chunk, value in enumerate(packed_sums(broadcast.sums)):
                size = min(broadcast.chunk_bytes, broadcast.nbytes - chunk * broadcast.chunk_bytes)
                buffer = self._buffer(broadcast.chunk_bytes)
                self._fill(self._group, buffer[:size])
                self._put(broadcast.serial, chunk, buffer, size, value)
            self._group.meet()
        except WeightsError:
            self._hang_up()
            raise

    def _buffer(self, nbytes: int) -> torch.Tensor:
        try:
            buffer = self._free.get(timeout=self._limit_s)
        except queue.Empty:
            raise WeightsError(f"weights that were broadcast found no room for {self._limit_s:g} s") from None
        if self._is_closed:
            raise WeightsError("this receiver of weights was closed")
        return buffer if buffer is not None and len(buffer) >= nbytes else torch.empty(nbytes, dtype=torch.uint8)

    def _fill(self, group: ProcessGroup, buffer: torch.Tensor) -> None:
        try:
            group.broadcast(buffer)
        except WeightsError:
            self._free.put(None)  # another buffer takes its place: this one may still be written to
            raise

    def _put(self, serial: int, chunk: int, buffer: torch.Tensor, size: int, value: bytes) -> None:
        data = buffer.numpy().data[:size]
        received = BroadcastChunk(serial, chunk, buffer, data, value, is_right=sum_of(data) == value)

        def arrive() -> None:
            self._inbox.append(received)
            self._changed()

        self._server.call(arrive)

    def _hang_up(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
