"""A client's access to the memory of units on its own host.

    put, ack   Reserve ──▶ place ──writable──▶ cells are written where they stay ──▶ Write names the place
    claim      Read ──▶ pin, places ──▶ anchor ◀── arrays are views of it ── … none is left ──▶ Done releases the pin

An anchor stands for the memory of one answer in one segment. Every array of the answer refers to it, and every view of
such an array too, however it was made. When the last anchor of a pin is gone, the pin is due. Due pins are sent along
with the next operation or sign of life.
"""

import os
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tailrace.errors import PeerLost, QueueError, WireError
from tailrace.transfer.queue.client.directory import endpoint
from tailrace.transfer.queue.messages import Cells, Done, Reserved, Unit
from tailrace.transfer.queue.storage.arena import ArenaView
from tailrace.transfer.wire.calls import Call
from tailrace.transfer.wire.frames import Buffer
from tailrace.transfer.wire.sockets import host_id

_WORTHWHILE = 64 * 2**10
"""The number of bytes from which a write is worth a request for a place first."""


class _Pin:
    """A token that lives as long as one of its anchors does."""


class Memory:
    """One client's view of units' memory, for one thread. Only its finalizers may run in any thread."""

    def __init__(self, *, shared: bool) -> None:
        """`shared`: whether to map memory of units at all."""
        self._shared = shared
        self._views: dict[str, ArenaView] = {}
        self._held: Counter[str] = Counter()
        """The number of unreleased pins by the endpoint of their unit: not due, or not sent yet."""
        self._due: deque[tuple[str, int]] = deque()

    def is_shared(self, unit: Unit) -> bool:
        """Whether the memory of `unit` can be mapped: it is on this host, and its directory is open to this process."""
        return (
            self._shared
            and bool(unit.directory)
            and unit.host == host_id()
            and os.access(unit.directory, os.R_OK | os.X_OK)
        )

    def is_worthwhile(self, unit: Unit, nbytes: int) -> bool:
        """Whether `nbytes` bytes are better written to the memory of `unit` than sent."""
        return nbytes >= _WORTHWHILE and self.is_shared(unit)

    def writable(self, unit: Unit, reserved: Reserved, nbytes: int) -> memoryview:
        """Return the writable bytes of a place that `unit` reserved.

        Raises:
            PeerLost: the unit's memory is gone.
            WireError: the segment's name is not a number, or the place lies outside of it.
        """
        segment = self._map(unit, reserved.segment)
        if reserved.offset + nbytes > len(segment):
            raise WireError(f"unit {unit.number} reserved {nbytes} bytes that lie outside of a segment")
        return segment[reserved.offset : reserved.offset + nbytes]

    def open(self, unit: Unit, cells: Cells, frames: Sequence[Buffer]) -> list[memoryview]:
        """Return the memories in which `cells` lie, read-only: the frames of the answer, or its segments.

        Raises:
            PeerLost: the memory of a segment is gone.
            WireError: the name of a segment is not a number.
        """
        if cells.pin is None:
            return [frame_memory(frame) for frame in frames]
        pin = _Pin()
        self._hold(endpoint(unit), cells.pin, pin)
        return [self._anchored(self._map(unit, name), pin) for name in cells.segments]

    def due(self) -> list[Call]:
        """Take the calls that release the pins that are due."""
        pins: dict[str, list[int]] = {}
        while self._due:
            to, pin = self._due.popleft()
            self._held[to] -= 1
            pins.setdefault(to, []).append(pin)
        return [Call(to, Done(numbers, [])) for to, numbers in pins.items()]

    @property
    def holders(self) -> list[str]:
        """The endpoints of the units that hold pins for this client."""
        return [to for to, count in self._held.items() if count > 0]

    def forget(self, unit: Unit) -> None:
        """Unmap the unused memory of a unit that may be gone. If the unit is there, it is mapped again when needed."""
        view = self._views.pop(unit.directory, None)
        if view is not None:
            view.close()

    def close(self) -> None:
        """Unmap all memory that is not in use."""
        for view in self._views.values():
            view.close()
        self._views.clear()

    def _hold(self, to: str, number: int, pin: _Pin) -> None:
        self._held[to] += 1
        weakref.finalize(pin, self._due.append, (to, number)).atexit = False

    def _anchored(self, segment: memoryview, pin: _Pin) -> memoryview:
        anchor = np.frombuffer(segment, np.uint8)
        weakref.finalize(anchor, _let_go, pin).atexit = False
        return anchor.data.toreadonly()

    def _map(self, unit: Unit, segment: str) -> memoryview:
        if not segment.isdecimal():
            raise WireError(f"unit {unit.number} names a segment {segment!r:.80}; expected a number")
        view = self._views.get(unit.directory)
        if view is None:
            view = self._views[unit.directory] = ArenaView(Path(unit.directory))
        try:
            return view.segment(int(segment))
        except QueueError as error:
            del self._views[unit.directory]
            raise PeerLost(f"the memory of unit {unit.number} is gone with its process: {error}") from None


def _let_go(pin: _Pin) -> None:
    """Do nothing: as the finalizer of an anchor, this keeps `pin` alive for as long as the anchor."""


def frame_memory(frame: Buffer) -> memoryview:
    """Return a frame as memory that begins at a multiple of 8, copied if needed: then arrays in it are aligned."""
    array = np.frombuffer(frame, np.uint8)
    return (array.copy() if array.ctypes.data % 8 else array).data.toreadonly()
