"""New weights out of a trainer's process.

    trainer ──publish──▶ chunk by chunk: copied and cast, summed while in the cache ──▶ shared memory
                           [own thread: SenderService] ──Plan, sums, chunks──▶ receivers, while it is written
                              [another: Broadcaster] ──broadcast──▶ those in a process group, when it is written

Who waits on whom: `publish` on nobody: memory that somebody still reads is left alone, and other memory is used.
`installed` on the receivers that are there, and on a limit.
"""

import math
import secrets
import threading
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from tailrace.errors import WeightsError, WeightsTimeout
from tailrace.events import Event, EventLog
from tailrace.registers.events import EventKind
from tailrace.transfer.weights.address import LISTEN, WeightsAddress, listening
from tailrace.transfer.weights.messages import NO_VERSION, WEIGHTS, version_or_none
from tailrace.transfer.weights.segments import SHARED, Pool
from tailrace.transfer.weights.sender_service import SenderService
from tailrace.transfer.weights.threads import ServerThread
from tailrace.transfer.weights.versions import (
    ALIGNMENT,
    Manifest,
    Piece,
    StoredVersion,
    TensorEntry,
    Writer,
    encode_manifest,
    pieces_by_chunk,
    plan_payload,
)
from tailrace.transfer.wire.frames import MAX_FRAME_BYTES
from tailrace.transfer.wire.server import Server
from tailrace.transfer.wire.sockets import host_id
from tailrace.types import WeightVersion

_CLOSE_LIMIT_S = 60.0
TOKEN_BYTES = 32
_IN_USE = 2
"""Versions whose memory a run mostly uses in turns: what engines have read last, and what is being written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverState:
    """A receiver that is there, as it has said last."""

    received: WeightVersion | None
    installed: WeightVersion | None
    parent: str
    """The name of the receiver that it gets weights from; empty for the sender."""
    bytes_received: int
    """Of weights, over sockets and by broadcasts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderStats:
    """What a sender has and has done."""

    version: WeightVersion | None
    """The newest that was published."""
    nbytes: int
    """Of its payload."""
    receivers: dict[str, ReceiverState]
    """By name; one of two with the same name."""
    distrusted: list[str]
    """Names of the receivers that others could not reach, so that nobody gets weights from them for a while."""
    bytes_sent: int
    """Of weights, over sockets, to one receiver each. Those in shared memory do not move."""
    bytes_broadcast: int
    """Of weights, to a process group, once for all of its members."""
    group: list[str]
    """Names of the receivers in it, once it is formed."""
    group_error: str | None
    """Why there is none though there are such receivers, or why its last broadcast failed."""


class WeightSender:
    """Publishes versions for the receivers that know its address. `close` it, or use it as a context manager."""

    def __init__(
        self,
        *,
        dtype: torch.dtype | None = None,
        chunk_mib: float = 4.0,
        datacentre: str = "",
        listen: Sequence[str] = LISTEN,
        limit_s: float = 10.0,
        directory: Path = SHARED,
        log: EventLog | None = None,
    ) -> None:
        """Listens from now on.

        Args:
            dtype: of floats as they travel; None leaves them as they are.
            chunk_mib: size of the pieces in which they travel, in MiB, up to 1024.
            datacentre: where it is, see `planning.broadcast`.
            listen: receivers on other hosts need an address of the network, such as tcp://10.0.0.7:*.
            limit_s: seconds without a sign of life after which a receiver counts as dead.
            directory: of shared memory.
            log: gets an event for each version that is published, in the thread that publishes.

        Raises:
            WeightsError: there is no shared memory, or pieces are larger than messages may be.
            WireError: it cannot listen there.
        """
        if chunk_mib > (most := MAX_FRAME_BYTES / 2**20):
            raise WeightsError(f"chunk_mib is {chunk_mib:g}; give {most:g} or less")
        self._dtype = dtype
        self._chunk_bytes = max(ALIGNMENT, int(chunk_mib * 2**20) // ALIGNMENT * ALIGNMENT)
        self._log = log
        self._stored: StoredVersion | None = None
        self._layout: tuple[tuple[TensorEntry, ...], list[list[Piece]]] = ((), [])
        self._serial = 0
        self._publishing = threading.Lock()
        token = secrets.token_bytes(TOKEN_BYTES)
        with ExitStack() as stack:
            self._pool = Pool(directory)
            stack.callback(self._pool.close)
            endpoints = stack.enter_context(listening(listen))
            self._server = Server("sender", token, WEIGHTS, endpoints=endpoints, silence_s=limit_s, signs_of_life=True)
            self._open = stack.pop_all()
        self.address = WeightsAddress(endpoints=self._server.endpoints, host=host_id(), token=token)
        """For receivers; it holds the token."""
        self._service = SenderService(self._server, self.address, datacentre=datacentre, limit_s=limit_s)
        self._thread = ServerThread(
            self._server, self._service, self._service.wakeups, name="weights", what="this sender of weights"
        )
        self._thread.start()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def reserve(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take the memory for versions of tensors like these now, so that the first to be published do not wait for it.

        Raises:
            WeightsError: a name comes twice, a dtype does not travel, or the machine has no room for them.
        """
        with self._publishing:
            manifest = plan_payload(1, 0, _by_name(tensors), dtype=self._dtype, chunk_bytes=self._chunk_bytes)
            self._pool.reserve(manifest.nbytes, _IN_USE)

    def publish(self, version: WeightVersion, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy the tensors, under their Hugging Face names, and announce the version. They may change afterwards.

        Receivers fetch chunks while this goes on. Where it raises, the version is withdrawn.

        Raises:
            WeightsError: the version is not newer than the one before, a name comes twice, a dtype does not travel,
                the machine has no room for it, or this was closed or has failed.
        """
        with self._publishing:
            start = 0.0 if self._log is None else self._log.now()
            before = NO_VERSION if self._stored is None else self._stored.manifest.version
            if version <= before:
                raise WeightsError(f"version {version} is not newer than {before}, which was published; count upwards")
            sources = _by_name(tensors)
            self._serial += 1
            manifest = plan_payload(self._serial, version, sources, dtype=self._dtype, chunk_bytes=self._chunk_bytes)
            self._write(manifest, list(sources.values()))
            if self._log is not None:
                metrics = {"bytes": float(manifest.nbytes)}
                self._log.emit(
                    Event(
                        task=EventKind.WEIGHTS_PUBLISH,
                        actor="trainer",
                        start=start,
                        end=self._log.now(),
                        version=version,
                        metrics=metrics,
                    )
                )

    async def installed(self, version: WeightVersion, *, timeout_s: float) -> None:
        """Wait until every receiver that is there has installed `version` or a later one; none may be there.

        A receiver that dies meanwhile does not hold it up longer than its `limit_s`.

        Raises:
            WeightsTimeout: some have not done so in time.
            WeightsError: this was closed or has failed.
        """
        found = await self._service.wakeups.wait_for(lambda: self._look(version), timeout_s=timeout_s)
        if isinstance(found, WeightsError):
            raise found
        if found is None:
            late = self._late(version)
            raise WeightsTimeout(
                f"{', '.join(sorted(late))}: version {version} of the weights is not installed after {timeout_s:g} s; "
                f"raise weights.timeout_s if they need longer"
            )

    def stats(self) -> SenderStats:
        """Counts, at once."""
        service = self._service
        names = {site: known.name for site, known in list(service.receivers.items())}
        receivers = {
            known.name: ReceiverState(
                received=version_or_none(known.progress.received),
                installed=version_or_none(known.progress.installed),
                parent=names.get(service.parent(known), ""),
                bytes_received=known.progress.nbytes,
            )
            for known in list(service.receivers.values())
        }
        manifest = None if self._stored is None else self._stored.manifest
        return SenderStats(
            version=None if manifest is None else manifest.version,
            nbytes=0 if manifest is None else manifest.nbytes,
            receivers=receivers,
            distrusted=[known.name for known in list(service.receivers.values()) if known.is_distrusted],
            bytes_sent=service.chunk_server.bytes_sent,
            bytes_broadcast=service.broadcaster.bytes_broadcast,
            group=[names[client] for client in service.broadcaster.members if client in names],
            group_error=None if service.broadcaster.error is None else str(service.broadcaster.error),
        )

    def close(self) -> None:
        """Tell the receivers, and stop; what was not fetched cannot be had any more. Harmless twice."""
        self._server.call(self._service.finish)
        self._thread.join(_CLOSE_LIMIT_S)
        self._service.broadcaster.join()
        self._open.close()

    def _write(self, manifest: Manifest, sources: list[torch.Tensor]) -> None:
        """Write the payload, while receivers follow."""
        service = self._service
        try:
            busy = self._thread.do(service.make_room)
            segment = self._pool.take(manifest.nbytes, manifest.serial, busy=busy)
            stored = StoredVersion(manifest, encode_manifest(manifest), segment)
            self._thread.do(lambda: service.begin(stored))
            writer = Writer(stored, sources)
            for chunk, pieces in enumerate(self._pieces(manifest)):
                writer.write(chunk, pieces)
                if stored.ready >= stored.wake_at:
                    stored.wake_at = math.inf  # `answer_waiting` finds the next one: one call for each is enough
                    self._server.call(service.chunk_server.answer_waiting)
            seal = stored.seal()
            self._thread.do(lambda: service.complete(seal))
        except BaseException:
            self._thread.do(lambda: service.withdraw(manifest.serial))
            raise
        self._stored = stored

    def _pieces(self, manifest: Manifest) -> list[list[Piece]]:
        """What lies in each chunk; mostly as in the version before."""
        if self._layout[0] != manifest.entries:
            self._layout = (manifest.entries, pieces_by_chunk(manifest))
        return self._layout[1]

    def _look(self, version: WeightVersion) -> bool | WeightsError | None:
        return self._thread.end or (None if self._late(version) else True)

    def _late(self, version: WeightVersion) -> list[str]:
        receivers = list(self._service.receivers.values())
        return [known.name for known in receivers if known.progress.installed < version]


def _by_name(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    sources: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if name in sources:
            raise WeightsError(f"{name} comes twice in the weights; give each tensor once")
        sources[name] = tensor.detach()
    return sources
