"""Receives new weights in an engine's process.

    sender ──▶ [own thread: ReceiverService] ──▶ received ──wait──▶ weights() ──▶ Engine.update_weights
       ◀────────────────────────────────────────────installed────────────────────────────┘

Waiting: `wait` waits for the version, up to a limit, and `turn` for other engines. Both end when the sender gives no
sign of life. The thread does not wait for the users of the weights: memory that is read is neither overwritten nor
released before the reader is done.
"""

import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from tailrace.config.weights import WeightsMedium
from tailrace.errors import WeightsError, WeightsTimeout
from tailrace.events import EventLog
from tailrace.transfer.weights.address import LISTEN, WeightsAddress, endpoint_towards, listening
from tailrace.transfer.weights.media.factory import check_medium
from tailrace.transfer.weights.messages import WEIGHTS, version_or_none
from tailrace.transfer.weights.receiver_service import ReceiverService
from tailrace.transfer.weights.segments import SHARED, Pool
from tailrace.transfer.weights.threads import ServerThread, copy_of
from tailrace.transfer.wire.connection import Patience
from tailrace.transfer.wire.server import Server
from tailrace.transfer.wire.sockets import host_id
from tailrace.types import WeightVersion

_CLOSE_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverStats:
    """The versions and counts of a receiver."""

    received: WeightVersion | None
    announced: WeightVersion | None
    installed: WeightVersion | None
    parent: str | None
    """The process that it gets weights from; empty for the sender, None before it has asked any."""
    bytes_received: int
    """Bytes of weights that came over sockets and by broadcasts. Weights in shared memory do not move."""
    bytes_broadcast: int
    """The part of `bytes_received` that came by broadcasts."""
    bytes_sent: int


class WeightReceiver:
    """Fetches each announced version in the background, the newest first, and relays it to others.

    Used from any thread and any event loop. `close` it, or use it as a context manager.
    """

    def __init__(
        self,
        address: WeightsAddress,
        *,
        name: str,
        datacentre: str = "",
        listen: Sequence[str] = LISTEN,
        medium: WeightsMedium = "auto",
        limit_s: float = 10.0,
        directory: Path = SHARED,
        log: EventLog | None = None,
    ) -> None:
        """Start to receive at once.

        Args:
            address: the sender's address.
            name: a name for people to read; also the actor of `weights_transfer` events.
            datacentre: this process's datacentre; weights cross the slow link to a datacentre once.
            listen: the endpoints at which it relays. Receivers on other hosts can only reach an address of the network.
            medium: auto: shared memory with peers on this host, TCP with others. gloo, nccl: broadcasts in a process
                group of all receivers in the sender's datacentre with this medium, and TCP for the rest.
            limit_s: seconds without a sign of life after which a peer counts as lost.
            directory: where shared memory is made.
            log: gets an event for each version that has come, from this receiver's thread.

        Raises:
            WeightsError: the sender cannot be reached from here, or there is no shared memory.
            WireError: it cannot listen at `listen`.
            ConfigError: this process cannot use the medium.
        """
        check_medium(medium)
        endpoint_towards(address.endpoints, address.host)
        with ExitStack() as stack:
            pool = Pool(directory)
            stack.callback(pool.close)
            endpoints = stack.enter_context(listening(listen))
            patience = Patience(limit_s=limit_s, retry_s=limit_s / 4, max_retry_s=limit_s / 2)
            facts = (name, address.token, WEIGHTS)
            server = Server(*facts, endpoints=endpoints, silence_s=limit_s, signs_of_life=True, patience=patience)
            self._service = ReceiverService(
                server,
                address,
                name=name,
                host=host_id(),
                datacentre=datacentre,
                medium=medium,
                patience=patience,
                pool=pool,
                log=log,
            )
            self._open = stack.pop_all()
        self._server = server
        self._thread = ServerThread(
            server, self._service, self._service.wakeups, name=f"weights of {name}", what="this receiver of weights"
        )
        server.call(self._service.sender.connect)
        self._thread.start()

    def __enter__(self) -> Self:
        """Return this receiver."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close this receiver."""
        self.close()

    @property
    def received(self) -> WeightVersion | None:
        """The newest version that is wholly here."""
        with self._service.status as status:
            return None if status.received is None else status.received.manifest.version

    @property
    def announced(self) -> WeightVersion | None:
        """The newest version that the sender has announced."""
        with self._service.status as status:
            return version_or_none(status.announced)

    async def announcement(self, version: WeightVersion, *, timeout_s: float) -> None:
        """Wait until the sender has announced `version` or a later one, which is on its way from then on.

        Raises:
            WeightsTimeout, SenderLost, WeightsError: as for `wait`.
        """

        def find() -> WeightVersion | WeightsError | None:
            announced = self.announced
            return announced if announced is not None and announced >= version else self._find(version)

        await self._until(find, version, timeout_s)

    async def wait(self, version: WeightVersion, *, timeout_s: float) -> WeightVersion:
        """Wait until `version` or a later one is wholly here, and return the newest version that is.

        Raises:
            WeightsTimeout: it has not come in time.
            SenderLost: the sender was closed, or gives no sign of life.
            WeightsError: such a version came and was given up, since it arrived corrupt again and again, or there is
                no room for it; or this receiver was closed or has failed.
        """
        return await self._until(lambda: self._find(version), version, timeout_s)

    async def heard(self, *, timeout_s: float) -> None:
        """Wait until the sender gives signs of life, again if it was lost, or until `timeout_s` have passed.

        Raises:
            WeightsError: this was closed or has failed.
        """

        def find() -> bool | WeightsError | None:
            with self._service.status as status:
                gives_signs = status.error is None
            return self._thread.end or (True if gives_signs else None)

        end = await self._service.wakeups.wait_for(find, timeout_s=timeout_s)
        if isinstance(end, WeightsError):
            raise end

    @contextmanager
    def weights(self) -> Iterator[tuple[WeightVersion, dict[str, torch.Tensor]]]:
        """The newest version that is wholly here: its number, and its tensors by Hugging Face name.

        The tensors are views of shared memory. Do not write to them, and do not keep them beyond the block.

        Raises:
            WeightsError: no version is here yet.
        """
        with self._service.memory.reading() as stored:
            if stored is None:
                raise WeightsError("no version of the weights is here yet; wait for one")
            yield stored.manifest.version, stored.tensors()

    def installed(self, version: WeightVersion) -> None:
        """Tell the sender that the engine has installed `version`."""
        with self._service.status as status:
            status.installed = version
        self._server.call(self._service.sender.report_progress)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Hold the turn to install inside the block: engines install a version one after the other.

        Waits without a limit for receivers that asked before. A receiver that dies, or is silent for the sender's
        limit, loses its turn.

        Raises:
            SenderLost: the sender was closed, or gives no sign of life.
            WeightsError: this was closed or has failed.
        """
        sender, turn = self._service.sender, secrets.token_hex(8)

        def find() -> bool | WeightsError | None:
            with self._service.status as status:
                has_turn = turn in status.turns
            return has_turn or self._trouble()

        self._server.call(lambda: sender.take_turn(turn))
        try:
            found = await self._service.wakeups.wait_for(find)
            if isinstance(found, WeightsError):
                raise copy_of(found)
            yield
        finally:
            self._server.call(lambda: sender.end_turn(turn))

    def stats(self) -> ReceiverStats:
        """The current versions and counts, without waiting."""
        bytes_sent = self._service.memory.chunk_server.bytes_sent
        with self._service.status as status:
            return ReceiverStats(
                received=None if status.received is None else status.received.manifest.version,
                announced=version_or_none(status.announced),
                installed=version_or_none(status.installed),
                parent=status.parent,
                bytes_received=status.nbytes,
                bytes_broadcast=status.bytes_broadcast,
                bytes_sent=bytes_sent,
            )

    def close(self) -> None:
        """Tell the sender, and stop. Calling it twice is harmless."""
        self._server.call(self._service.finish)
        self._thread.join(_CLOSE_LIMIT_S)
        self._service.join()
        self._open.close()

    async def _until(
        self, find: Callable[[], WeightVersion | WeightsError | None], version: WeightVersion, timeout_s: float
    ) -> WeightVersion:
        """Wait until `find` returns a version or an error; raise the error."""
        found: WeightVersion | WeightsError | None
        found = await self._service.wakeups.wait_for(find, timeout_s=timeout_s)
        if isinstance(found, WeightsError):
            raise copy_of(found)
        if found is None:
            raise WeightsTimeout(
                f"version {version} of the weights has not come within {timeout_s:g} s; here is {self.received}, "
                f"announced {self.announced}; raise weights.timeout_s if the network needs longer"
            )
        return found

    def _find(self, version: WeightVersion) -> WeightVersion | WeightsError | None:
        """The version that is here if it is `version` or a later one, or the reason why none will come."""
        with self._service.status as status:
            received, refusal = status.received, status.refusal
        if received is not None and received.manifest.version >= version:
            return received.manifest.version
        if refusal is not None and refusal[0] >= version:
            return refusal[1]
        return self._trouble()

    def _trouble(self) -> WeightsError | None:
        """The reason why nothing comes from the sender, if there is one."""
        with self._service.status as status:
            return self._thread.end or status.error
