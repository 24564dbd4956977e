"""The places and pins that clients hold in a unit's shared memory.

    reserve ──▶ place ──written, done, or its client is forgotten──▶ the storage's, or free
    pin ──▶ pin ──done, its client silent for longer than it promised, or forgotten──▶ free

A client that has promised signs of life and gives none counts as dead, and its pins are taken back. Wrong bytes that it
may read then do no harm, since its leases have ended too. Its places are not taken back: if it was only stopped, it
would go on writing to memory that belongs to another client. Places go back when the server forgets the client.

A client that has promised nothing is not watched: its pins also go back when the server forgets it. That is an hour
after its last message to this unit, and not while its connection stands (`Server`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tailrace.errors import QueueError
from tailrace.transfer.queue.storage.arena import ArenaStorage, Place
from tailrace.transfer.queue.storage.base import PartId, Storage
from tailrace.types import IntArray


@dataclass(slots=True, eq=False)
class _Holder:
    places: dict[int, Place] = field(default_factory=dict)
    """Reserved places by their serial."""
    pins: set[int] = field(default_factory=set)
    limit_s: float | None = None
    """The seconds within which the client promised its next sign of life; None if it promised nothing."""
    deadline: float = 0.0


class ClientHolds:
    """The places and pins of each client. There are none if the storage is not shared memory."""

    def __init__(self, storage: Storage) -> None:
        self.arena = storage if isinstance(storage, ArenaStorage) else None
        """The storage, if clients can share its memory; else None."""
        self._holders: dict[str, _Holder] = {}

    @property
    def next_deadline(self) -> float | None:
        """The time at which the next client will have been silent for too long."""
        return min((holder.deadline for holder in self._holders.values() if holder.limit_s is not None), default=None)

    def reserve(self, client: str, nbytes: int) -> Place:
        """Reserve room for the parts of one write.

        Raises:
            StorageFull: there is no room.
            QueueError: the storage is not shared memory.
        """
        if self.arena is None:
            raise QueueError("this unit has no memory to share; write frames, or give it storage of type 'arena'")
        place = self.arena.reserve(nbytes)
        self._holder(client).places[place.serial] = place
        return place

    def commit(self, client: str, serial: int, parts: Sequence[tuple[PartId, int]]) -> None:
        """Keep the parts that `client` has written one after the other into a place. Each comes with its bytes.

        Raises:
            QueueError: the client does not hold that place; or see `ArenaStorage.commit`.
        """
        holder = self._holders.get(client)
        if self.arena is None or holder is None or serial not in holder.places:
            raise QueueError(f"place {serial} is not reserved by {client!r}: it was written, given back or taken back")
        self.arena.commit(holder.places[serial], parts)
        del holder.places[serial]

    def pin(self, client: str, parts: Sequence[PartId], now: float) -> tuple[int, IntArray]:
        """Keep `parts` where they are. Return the pin and an array [parts, 2]: segment and offset in bytes.

        Segments count from 1; a part without bytes lies in no segment, at 0, 0.

        Raises:
            StaleRowError: a part is not stored (any more).
        """
        assert self.arena is not None, "only shared memory is pinned"
        places = np.array(self.arena.places(parts), np.int64).reshape(-1, len(Place._fields))
        holder = self._holder(client)
        pin = self.arena.pin(parts)
        holder.pins.add(pin)
        if holder.limit_s is not None:
            holder.deadline = now + holder.limit_s
        return pin, places[:, :2]

    def beat(self, client: str, limit_s: float, now: float) -> None:
        """Note a sign of life of `client`, which promises the next one within `limit_s` seconds."""
        holder = self._holder(client)
        holder.limit_s, holder.deadline = limit_s, now + limit_s

    def done(self, client: str, pins: Iterable[int], places: Iterable[int]) -> None:
        """Give back these pins and places of `client`. Those that it does not hold (any more) are ignored."""
        holder = self._holders.get(client)
        if holder is None or self.arena is None:
            return
        for pin in holder.pins.intersection(pins):
            self.arena.unpin(pin)
            holder.pins.remove(pin)
        for serial in holder.places.keys() & set(places):
            self.arena.abandon(holder.places.pop(serial))

    def silent(self, now: float) -> None:
        """Take back the pins of clients that are overdue with a sign of life."""
        for client, holder in self._holders.items():
            if holder.limit_s is not None and holder.deadline <= now:
                self.done(client, list(holder.pins), ())
                holder.limit_s = None

    def forget(self, client: str) -> None:
        """Take back all places and pins of a client."""
        holder = self._holders.get(client)
        if holder is not None:
            self.done(client, list(holder.pins), list(holder.places))
            del self._holders[client]

    def _holder(self, client: str) -> _Holder:
        return self._holders.setdefault(client, _Holder())
