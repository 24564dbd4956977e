"""The versions in a receiver's memory: its own, and that of other processes on its host.

    take, attach ──[worker]──▶ segment ──▶ give ──▶ ChunkServer, `reading` ──drop──▶ segment released

Whatever was given leaves by `_drop` alone, which ends the hold on memory of others in the same step: so the owner of
the memory uses it again as soon as nobody reads it here.

Who waits on whom: nobody on this; memory is found in a worker's thread, which takes about a second for each GB.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from tailrace.errors import WeightsError
from tailrace.transfer.weights.chunk_server import ChunkServer
from tailrace.transfer.weights.messages import NOTHING
from tailrace.transfer.weights.receiver_status import ReceiverStatus
from tailrace.transfer.weights.segments import Attachments, Pool, Segment
from tailrace.transfer.weights.threads import Guarded, Worker
from tailrace.transfer.weights.versions import Manifest, StoredVersion
from tailrace.transfer.wire.server import Server

Placed: TypeAlias = Callable[[Segment | WeightsError], None]
"""Called in the receiver's thread with the memory for a payload, or with why there is none."""


class ReceiverMemory:
    """Used in the thread of `server`, but for `reading` and `join`."""

    def __init__(self, server: Server, pool: Pool, status: Guarded[ReceiverStatus]) -> None:
        """Nothing is here yet. `pool`: of this process's own memory."""
        self.pool = pool
        self.chunk_server = ChunkServer(server)
        """Gives what is here to other receivers."""
        self._server, self._status = server, status
        self._attachments = Attachments()
        self._worker = Worker(server, "memory for weights")
        """Finds memory, and is alone with the attachments."""

    def take(self, manifest: Manifest, then: Placed) -> None:
        """Find memory of this process's own. Versions whose memory may be used for it are given no more."""
        with self._status as status:
            kept = {_serial(status.received), manifest.serial} | set(status.readers)  # the download moves what it has
        self._drop(stored for stored in self.chunk_server.versions if stored.manifest.serial not in kept)
        busy = self.chunk_server.segments
        self._worker.start(lambda: self.pool.take(manifest.nbytes, manifest.serial, busy=busy), then)

    def attach(self, path: Path, manifest: Manifest, then: Placed) -> None:
        """Find memory of another process on this host with this version, held until `release`."""
        self._worker.start(lambda: self._attachments.attach(path, manifest.serial, manifest.nbytes), then)

    def give(self, stored: StoredVersion) -> None:
        """Give a version to others, in place of one with the same serial. From now on its segment is held here."""
        before = self.chunk_server.add(stored)
        if before is not None and before.segment is not stored.segment:
            self.release(before.segment)

    def keep(self, stored: StoredVersion) -> None:
        """A version that was given is whole: have it read, rather than the one before."""
        with self._status as status:
            status.received, status.refusal = stored, None
        self.drop_unused()

    def give_up(self, serial: int) -> None:
        """Give a version no more, if it was given."""
        self._drop(stored for stored in self.chunk_server.versions if stored.manifest.serial == serial)

    def drop_unused(self) -> None:
        """Let go of memory of others that is older than the newest version, and that nobody reads."""
        with self._status as status:
            newest, read = _serial(status.received), set(status.readers)
        older = (stored for stored in self.chunk_server.versions if stored.manifest.serial < newest)
        unread = (stored for stored in older if stored.manifest.serial not in read)
        self._drop(stored for stored in unread if not self._is_ours(stored.segment))

    def release(self, segment: Segment) -> None:
        """End the hold of `attach`. Memory of this process's own is held by nobody: the pool uses it again."""
        if not self._is_ours(segment):
            segment.release()

    @contextmanager
    def reading(self) -> Iterator[StoredVersion | None]:
        """From any thread: the newest version that is wholly here, if any. In the block it stays as it is."""
        with self._status as status:
            stored = status.received
            serial = _serial(stored)
            status.readers[serial] += 1
        try:
            yield stored
        finally:
            with self._status as status:
                status.readers[serial] -= 1
                if not status.readers[serial]:
                    del status.readers[serial]
            self._server.call(self.drop_unused)

    def join(self) -> None:
        """From another thread, at the end: wait for the worker, and let go of memory of others."""
        self._worker.join()
        self._attachments.close()

    def _drop(self, versions: Iterable[StoredVersion]) -> None:
        for stored in list(versions):
            self.chunk_server.drop([stored.manifest.serial])
            self.release(stored.segment)

    def _is_ours(self, segment: Segment) -> bool:
        return segment.path.is_relative_to(self.pool.directory)


def _serial(stored: StoredVersion | None) -> int:
    return NOTHING if stored is None else stored.manifest.serial
