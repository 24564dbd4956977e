"""The versions in a receiver's memory: its own, and that of other processes on its host.

    take, attach ──[worker]──▶ segment ──▶ give ──▶ ChunkServer, `reading` ──drop──▶ segment released

A served version leaves by `_drop` alone, which ends the hold on memory of other processes in the same step. So the
owner of the memory reuses it as soon as it is not read here.

Waiting: nothing waits here. A worker's thread finds memory, which takes about a second for each GB.
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
"""Called in the receiver's thread with the memory for a payload, or with the error if there is none."""


class ReceiverMemory:
    """The versions here, and their memory. Used in the thread of `server`, except for `reading` and `join`."""

    def __init__(self, server: Server, pool: Pool, status: Guarded[ReceiverStatus]) -> None:
        """Start without versions. `pool`: this process's own memory."""
        self.pool = pool
        self.chunk_server = ChunkServer(server)
        """Serves the versions here to other receivers."""
        self._server, self._status = server, status
        self._attachments = Attachments()
        self._worker = Worker(server, "memory for weights")
        """Finds memory. Only its thread uses the attachments."""

    def take(self, manifest: Manifest, then: Placed) -> None:
        """Find memory in this process for a version. Versions whose memory it may reuse are served no longer."""
        with self._status as status:
            kept = {_serial(status.received), manifest.serial} | set(status.readers)  # the download copies its chunks
        self._drop(stored for stored in self.chunk_server.versions if stored.manifest.serial not in kept)
        busy = self.chunk_server.segments
        self._worker.start(lambda: self.pool.take(manifest.nbytes, manifest.serial, busy=busy), then)

    def attach(self, path: Path, manifest: Manifest, then: Placed) -> None:
        """Find the memory of another process on this host with this version. It is held until `release`."""
        self._worker.start(lambda: self._attachments.attach(path, manifest.serial, manifest.nbytes), then)

    def give(self, stored: StoredVersion) -> None:
        """Serve a version, in place of one with the same serial. Its segment is held here from now on."""
        before = self.chunk_server.add(stored)
        if before is not None and before.segment is not stored.segment:
            self.release(before.segment)

    def keep(self, stored: StoredVersion) -> None:
        """Let readers have this served version, which is now whole, instead of the one before."""
        with self._status as status:
            status.received, status.refusal = stored, None
        self.drop_unused()

    def give_up(self, serial: int) -> None:
        """Stop serving a version, if it was served."""
        self._drop(stored for stored in self.chunk_server.versions if stored.manifest.serial == serial)

    def drop_unused(self) -> None:
        """Release the memory of other processes with versions that are older than the newest and not read."""
        with self._status as status:
            newest, read = _serial(status.received), set(status.readers)
        older = (stored for stored in self.chunk_server.versions if stored.manifest.serial < newest)
        unread = (stored for stored in older if stored.manifest.serial not in read)
        self._drop(stored for stored in unread if not self._is_ours(stored.segment))

    def release(self, segment: Segment) -> None:
        """End the hold of `attach`. This process's own memory has no hold: the pool reuses it."""
        if not self._is_ours(segment):
            segment.release()

    @contextmanager
    def reading(self) -> Iterator[StoredVersion | None]:
        """The newest version that is wholly here, if any. It stays unchanged inside the block. For any thread."""
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
        """Wait for the worker at the end, and release the memory of other processes. Called from another thread."""
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
