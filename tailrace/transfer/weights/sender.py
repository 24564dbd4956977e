"""Publishes new weights from a trainer's process.

    trainer ──publish──▶ chunk by chunk: copied and cast, summed while in the cache ──▶ shared memory
                           [own thread: SenderService] ──Plan, sums, chunks──▶ receivers, while it is written
                              [another: Broadcaster] ──broadcast──▶ those in a process group, when it is written

Waiting: `publish` waits for no receiver: memory that is still read is left alone, and other memory is used.
`installed` waits for the connected receivers, up to a limit.
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
"""The versions whose memory a run mostly uses in turns: the one that engines have read last, and the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverState:
    """The last report of a connected receiver."""

    received: WeightVersion | None
    installed: WeightVersion | None
    parent: str
    """The name of the receiver that it gets weights from; empty for the sender."""
    bytes_received: int
    """Bytes of weights that came over sockets and by broadcasts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderStats:
    """The version, receivers and counts of a sender."""

    version: WeightVersion | None
    """The newest published version."""
    nbytes: int
    """The size of its payload."""
    receivers: dict[str, ReceiverState]
    """The receivers by name; only one of two with the same name."""
    distrusted: list[str]
    """The names of receivers that others could not reach. For a while no receiver gets weights from them."""
    bytes_sent: int
    """Bytes of weights sent over sockets, each to one receiver. Weights in shared memory do not move."""
    bytes_broadcast: int
    """Bytes of weights broadcast to a process group, counted once for all of its members."""
    group: list[str]
    """The names of the receivers in the process group, once it is formed."""
    group_error: str | None
    """The reason why there is no group although receivers want one, or why its last broadcast failed."""


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
        """Start to listen.

        Args:
            dtype: the type in which floats travel; None keeps each tensor's own.
            chunk_mib: size of the chunks in which weights travel, in MiB, up to 1024.
            datacentre: this process's datacentre; see `planning.broadcast`.
            listen: the endpoints. Receivers on other hosts need an address of the network, such as tcp://10.0.0.7:*.
            limit_s: seconds without a sign of life after which a receiver counts as dead.
            directory: where shared memory is made.
            log: gets an event for each published version, from the thread that publishes.

        Raises:
            WeightsError: there is no shared memory, or chunks are larger than messages may be.
            WireError: it cannot listen at `listen`.
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
        """The address for receivers; it holds the token."""
        self._service = SenderService(self._server, self.address, datacentre=datacentre, limit_s=limit_s)
        self._thread = ServerThread(
            self._server, self._service, self._service.wakeups, name="weights", what="this sender of weights"
        )
        self._thread.start()

    def __enter__(self) -> Self:
        """Return this sender."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close this sender."""
        self.close()

    def reserve(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Make memory for versions of tensors like these now, so that the first versions do not wait for it.

        Raises:
            WeightsError: a name comes twice, a dtype does not travel, or the machine has no room for them.
        """
        with self._publishing:
            manifest = plan_payload(1, 0, _by_name(tensors), dtype=self._dtype, chunk_bytes=self._chunk_bytes)
            self._pool.reserve(manifest.nbytes, _IN_USE)

    def publish(self, version: WeightVersion, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy the tensors, under their Hugging Face names, and announce the version.

        The tensors may change afterwards. Receivers fetch chunks during the copy. If this raises, the version is
        withdrawn.

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
        """Wait until every connected receiver has installed `version` or a later one; there may be no receiver.

        A receiver that dies meanwhile delays this by no more than the sender's `limit_s`.

        Raises:
            WeightsTimeout: some receivers have not installed it in time.
            WeightsError: this sender was closed or has failed.
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
        """The current version, receivers and counts, without waiting."""
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
        """Tell the receivers, and stop. Nothing can be fetched afterwards. Calling it twice is harmless."""
        self._server.call(self._service.finish)
        self._thread.join(_CLOSE_LIMIT_S)
        self._service.broadcaster.join()
        self._open.close()

    def _write(self, manifest: Manifest, sources: list[torch.Tensor]) -> None:
        """Write the payload, while receivers fetch it."""
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
        """The pieces of each chunk. They are kept for the next version, which mostly has the same layout."""
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
