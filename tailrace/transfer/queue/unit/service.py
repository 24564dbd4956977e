"""A storage unit: it answers clients and the controller.

    client      Write ──frames──▶ store: one copy ─────┐
                Reserve ──▶ place ──Write──▶ commit ───┴──▶ parts ──of tag 0──▶ Written to the controller
                Read ──▶ places in shared memory, pinned until Done; or frames: one copy of the cells asked for
                     └─ a part that the storage has lost ──▶ Join to the controller as a restarted unit
    controller  Copy ──▶ parts are written to another unit
                Settle ──▶ parts are dropped, rows that left are refused from then on
                Inventory ──▶ all parts that are stored, also those from before a restart

A part is the cells that one Write brought for one row under one tag. Parts never change, and only the controller knows
which of them count. So nothing depends on the order in which messages of clients and the controller arrive.

Waiting: Write and Read wait for the first Joined, which names the queue's columns; their senders have limits. No
request waits for room: the answer is StorageFull. Every request waits while the storage uses its disk or server; for
Redis no longer than its timeout.
"""

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from itertools import islice, repeat

import numpy as np

from tailrace.errors import PeerLost, StaleRowError, WireError
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.cells import PartCodec
from tailrace.transfer.queue.messages import (
    Cells,
    Copy,
    Done,
    Inventory,
    Join,
    Joined,
    Parts,
    Read,
    Reserve,
    Reserved,
    Run,
    Settle,
    Write,
    pack,
    unpack,
)
from tailrace.transfer.queue.storage.base import PartBatch, PartId, Storage, part_ids
from tailrace.transfer.queue.unit.client_holds import ClientHolds
from tailrace.transfer.queue.unit.copying import Copying
from tailrace.transfer.queue.unit.index import Located, PartIndex
from tailrace.transfer.queue.unit.link import ControllerLink
from tailrace.transfer.wire.frames import MAX_FRAME_BYTES, PIECE_BYTES, Reply
from tailrace.transfer.wire.messages import Accepted, Beat, Cancel, Message
from tailrace.transfer.wire.server import Handler, Incoming, Server, Service, Ticket
from tailrace.transfer.wire.sockets import host_id
from tailrace.types import IntArray

_SHARED_BYTES = 2**16
"""Reads of at least this many bytes go through shared memory. A copy of fewer bytes costs less than a pin."""
_TRIM_EVERY_S = 60.0
"""Shared memory that was unused for this long, in seconds, is given back."""


class StorageUnit(Service):
    """Serves one storage until its server is stopped: `server.run(StorageUnit(server, storage, ...))`."""

    def __init__(
        self,
        server: Server,
        storage: Storage,
        *,
        name: str,
        controller: str,
        max_bytes: int,
        join_every_s: float = 1.0,
        patience_s: float = math.inf,
    ) -> None:
        """`name`: stays the same over restarts. `controller`: its endpoint. `max_bytes`: the capacity of the storage.

        `patience_s`: seconds without an answer of the controller after which the queue counts as ended.

        Raises:
            WireError: `controller` is not an endpoint.
            QueueError: see `Storage.take_stock`.
        """
        self._server = server
        self._storage = storage
        self._longest_read = max(max_bytes, MAX_FRAME_BYTES)
        self._holds = ClientHolds(storage)
        self._left: dict[int, int] = {}
        """The newest generation that has left the queue, by slot."""
        self._undropped: set[PartId] = set()
        """Settled parts that the storage failed to drop. It is asked again at the next Settle."""
        self._index = self._take_stock()
        self._codec: PartCodec | None = None
        self._waiting: list[tuple[Incoming, Handler]] = []
        """Requests that wait for the queue's columns."""
        directory = "" if self._holds.arena is None else str(self._holds.arena.directory)
        join = Join(
            name=name,
            incarnation=secrets.token_hex(8),
            lasting=storage.lasting,
            endpoints=server.own_endpoints,
            host=host_id(),
            directory=directory,
            max_bytes=max_bytes,
        )
        self._link = ControllerLink(server, controller, join, self._on_joined)
        self._join_every_s = join_every_s
        self._patience_s = patience_s
        self.has_left = False
        """Whether it has left the queue, which is why its server was stopped."""
        self._next_join = server.now
        self._next_trim = server.now + _TRIM_EVERY_S

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        """See `Service.handlers`."""
        return {
            Reserve: self._reserve,
            Write: self._with_columns(self._write),
            Read: self._with_columns(self._read),
            Done: self._done,
            Beat: self._beat,
            Cancel: self._cancel,
            Settle: self._settle,
            Inventory: self._inventory,
            Copy: self._with_columns(self._copy_to),
        }

    @property
    def next_deadline(self) -> float | None:
        """See `Service.next_deadline`."""
        times = [self._next_join, self._next_trim, self._holds.next_deadline]
        return min(when for when in times if when is not None)

    def tick(self, now: float) -> None:
        """See `Service.tick`.

        Raises:
            TailraceError: the controller refuses this unit, or has not answered for too long.
        """
        if now - self._link.heard > self._patience_s:
            raise PeerLost(f"the queue has not answered for {self._patience_s:g} s: it has ended, or cannot be reached")
        self._holds.silent(now)
        if now >= self._next_join:
            self._link.join()
            self._next_join = now + self._join_every_s
        if now >= self._next_trim:
            if self._holds.arena is not None:
                self._holds.arena.trim()
            self._next_trim = now + _TRIM_EVERY_S

    def gone(self, client: str) -> None:
        """See `Service.gone`."""
        self._holds.forget(client)
        self._waiting = [entry for entry in self._waiting if entry[0].ticket.client != client]

    def leave(self) -> None:
        """Have other units take over all rows. Then the server is stopped, and `has_left` is set."""
        self._link.leave()

    def _on_joined(self, joined: Joined) -> None:
        if joined.left:
            self.has_left = True
            self._server.stop("it has left the queue, and its rows are on other units")
        self._codec = PartCodec(joined.columns)
        waiting, self._waiting = self._waiting, []
        for incoming, handler in waiting:
            self._server.carry_out(incoming, handler)

    def _with_columns(self, handler: Callable[[PartCodec, Incoming], Reply | None]) -> Handler:
        """Wrap `handler` so that requests wait until the queue's columns are known."""

        def handle(incoming: Incoming) -> Reply | None:
            if self._codec is None:
                self._waiting.append((incoming, handle))
                return None
            return handler(self._codec, incoming)

        return handle

    # Messages from clients

    def _reserve(self, incoming: Incoming) -> Reply:
        place = self._holds.reserve(incoming.ticket.client, incoming.message.nbytes)
        return Reply(Reserved(place.serial, str(place.segment), place.offset))

    def _write(self, codec: PartCodec, incoming: Incoming) -> None:
        """Store parts. A put is answered when the controller knows of it: from then on it notices a loss."""
        message: Write = incoming.message
        rows = unpack(message.rows, 2)
        self._check_current(rows)
        batches = _batches(codec, part_ids(rows, repeat(message.tag)), message.runs)
        if message.place is None:
            self._store(batches, incoming.frames)
        else:
            parts = [part for batch in batches for part in batch.sized]
            self._holds.commit(incoming.ticket.client, message.place, parts)
        is_put = message.tag == 0 and len(rows) > 0 and not message.told
        if is_put:
            self._link.tell(message.rows, lambda answer: self._server.reply(incoming.ticket, answer))
        else:
            self._server.reply(incoming.ticket, Accepted())
        for batch in batches:  # the writer goes on meanwhile; a read comes later
            self._index.add(batch)

    def _store(self, batches: Sequence[PartBatch], frames: Sequence[memoryview]) -> None:
        if len(frames) != len(batches):
            raise WireError(f"{len(batches)} runs came with {len(frames)} frames; expected one for each")
        self._storage.store(list(zip(batches, frames, strict=True)))

    def _check_current(self, rows: IntArray) -> None:
        for slot, generation in rows.tolist():
            if generation <= self._left.get(slot, -1):
                row = RowId(slot, generation)
                raise StaleRowError(f"{row} cannot be written: it has left the queue, or was never let in")

    def _read(self, codec: PartCodec, incoming: Incoming) -> Reply:
        message: Read = incoming.message
        rows, tags = unpack(message.rows, 2), unpack(message.tags, len(message.columns))
        if len(tags) != len(rows):
            raise WireError(f"a read of {len(rows)} rows came with the tags of {len(tags)}")
        cells = self._index.locate(codec, rows, message.columns, tags)
        nbytes = int(cells.sizes.sum())
        if nbytes > self._longest_read:  # a short message that repeats a cell could ask for any amount of memory
            raise WireError(f"got a read of {nbytes} bytes, expected at most {self._longest_read}; name cells once")
        if message.shared and self._holds.arena is not None and nbytes >= _SHARED_BYTES:
            return self._share(cells, incoming.ticket.client)
        return self._copy(cells)

    def _share(self, cells: Located, client: str) -> Reply:
        pin, places = self._holds.pin(client, cells.parts, self._server.now)
        segments = np.unique(places[places[:, 0] > 0, 0])
        numbers = np.searchsorted(segments, places[:, 0])  # 0 for parts without bytes
        where = np.stack([numbers[cells.part], places[cells.part, 1] + cells.offsets], axis=-1)
        return Reply(Cells(pack(cells.lengths), pack(where), list(map(str, segments.tolist())), pin))

    def _copy(self, cells: Located) -> Reply:
        memories = self._read_parts(cells.parts)
        frames: list[list[memoryview]] = [[]]
        places = []
        end = 0
        columns = (cells.part, cells.offsets, cells.sizes)
        for part, offset, size in zip(*(column.ravel().tolist() for column in columns), strict=True):
            if end and end + size > PIECE_BYTES:
                frames.append([])
                end = 0
            places.append((len(frames) - 1, end))
            frames[-1].append(memories[part][offset : offset + size])
            end += size
        where = np.array(places, np.int64)
        return Reply(Cells(pack(cells.lengths), pack(where), [], None), list(map(b"".join, frames)))

    def _read_parts(self, parts: Sequence[PartId]) -> list[memoryview]:
        try:
            return self._storage.read_many(parts)
        except StaleRowError:
            self._index.drop([part for part in parts if part not in self._storage])
            self._begin_anew()
            raise

    def _begin_anew(self) -> None:
        """Rejoin after the storage has lost parts. The controller then asks which are left; the rest are lost."""
        if self._storage.lasting:  # it has looked which others are lost, too
            self._index = self._take_stock()
        self._link.begin_anew()

    def _take_stock(self) -> PartIndex:
        """Return an index of the stored parts, without those that are to be dropped."""
        index = PartIndex()
        for batch in self._storage.take_stock():
            index.add(batch)
        index.drop(self._undropped)
        return index

    def _done(self, incoming: Incoming) -> Reply:
        self._holds.done(incoming.ticket.client, incoming.message.pins, incoming.message.places)
        return Reply(Accepted())

    def _beat(self, incoming: Incoming) -> Reply:
        message: Beat = incoming.message
        self._holds.beat(incoming.ticket.client, message.limit_s, self._server.now)
        return Reply(Accepted())

    def _cancel(self, incoming: Incoming) -> Reply:
        ticket = Ticket(incoming.ticket.client, incoming.message.number)
        self._waiting = [entry for entry in self._waiting if entry[0].ticket != ticket]
        match self._server.answers.get(ticket):
            case Reserved(place=place):
                self._holds.done(ticket.client, [], [place])
            case Cells(pin=int(pin)):
                self._holds.done(ticket.client, [pin], [])
        return Reply(Accepted())

    # Messages from the controller

    def _settle(self, incoming: Incoming) -> Reply:
        lost = unpack(incoming.message.parts, 3)
        parts = part_ids(lost[:, :2], lost[:, 2].tolist())
        for slot, generation in unpack(incoming.message.rows, 2).tolist():
            self._left[slot] = max(self._left.get(slot, -1), generation)
            parts += self._index.of_row(slot, generation)
        self._index.drop(parts)
        self._undropped.update(parts)
        self._storage.drop(self._undropped)
        self._undropped.clear()
        return Reply(Accepted())

    def _copy_to(self, codec: PartCodec, incoming: Incoming) -> None:
        numbers = unpack(incoming.message.parts, 3)
        parts = part_ids(numbers[:, :2], numbers[:, 2].tolist())
        if not parts:
            raise WireError("got a copy of no parts, expected one or more")
        batches = self._index.batches(codec, parts)
        frames = [b"".join(self._read_parts(batch.parts)) for batch in batches]
        Copying(self._server, incoming, batches, frames)

    def _inventory(self, incoming: Incoming) -> Reply:
        return Reply(Parts(pack(np.array(list(self._storage.parts()), np.int64))))


def _batches(codec: PartCodec, parts: Sequence[PartId], runs: Sequence[Run]) -> list[PartBatch]:
    """Return the parts that `runs` describe, a batch for each run.

    Raises:
        ColumnError: the lengths do not fit the columns.
        WireError: the runs have another number of rows than `parts`.
    """
    if (total := sum(run.rows for run in runs)) != len(parts):
        raise WireError(f"{len(parts)} rows came with runs of {total}")
    left = iter(parts)
    batches = []
    for run in runs:
        lengths = run.table()
        sizes = codec.sizes(run.columns, lengths)
        batches.append(PartBatch(list(islice(left, run.rows)), run.columns, lengths, sizes))
    return batches
