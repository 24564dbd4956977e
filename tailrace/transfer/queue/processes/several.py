"""The processes of a queue of several controllers: each has a directory and `QueueProcesses` of its own.

    directory/connection.json ◀── all addresses ── SeveralProcesses ──▶ QueueProcesses of shard-0: controller, its units
              shard-0/, shard-1/, …                                 ──▶ QueueProcesses of shard-1: controller, its units

Each part watches and restarts its processes by itself. When one is given up, the queue is: all others are ended, too.

Waiting: see `QueueProcesses`. All parts start and end at the same time.
"""

import asyncio
import secrets
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from tailrace.config.queue_table import TableConfig
from tailrace.config.transfer import ServiceQueueConfig
from tailrace.errors import QueueError, TailraceError
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.processes.plan import CONTROLLER, Place, address_before
from tailrace.transfer.queue.processes.supervisor import QueueProcesses


def queue_processes(
    config: ServiceQueueConfig, table: TableConfig, directory: Path, *, resume: bool = False
) -> "QueueProcesses | SeveralProcesses":
    """Make the processes of a queue, with as many controllers as `config` says. Arguments: see `QueueProcesses`."""
    if config.controllers == 1:
        return QueueProcesses(config, table, directory, resume=resume)
    return SeveralProcesses(config, table, directory, resume=resume)


class SeveralProcesses:
    """The processes of a queue of several controllers. They run in the block of a `with` or `async with`."""

    def __init__(
        self, config: ServiceQueueConfig, table: TableConfig, directory: Path, *, resume: bool = False
    ) -> None:
        """See `QueueProcesses`.

        Raises:
            UserError: with `resume`, the directory has a queue of another number of controllers, or no address.
        """
        self._directory = directory
        share, count = share_of(config), config.controllers
        before = address_before(self.connection, controllers=count) if resume else None
        token = secrets.token_bytes(32) if before is None else before.token
        self._parts = [
            QueueProcesses(
                share, table, directory / f"shard-{number}", resume=resume, place=Place(number, count, token)
            )
            for number in range(count)
        ]
        self._giving_up = threading.Lock()
        self._first_given_up: QueueProcesses | None = None
        self._on_given_up: Callable[[], object] | None = None
        for part in self._parts:
            part.on_given_up(partial(self._give_up, part))

    def __enter__(self) -> Self:
        """Start all processes.

        Raises:
            UserError, QueueError: see `QueueProcesses`.
        """
        try:
            for part in self._parts:
                part.begin()
            for part in self._parts:
                part.await_start()
            self.address.write(self.connection)
        except BaseException as error:
            failures = self._end()
            if failures and isinstance(error, QueueError):
                raise failures[0] from None  # the others were stopped for that
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all processes.

        Raises:
            QueueError: the queue had been given up, which explains any error in the block.
        """
        failures = self._end()
        if failures and (error is None or isinstance(error, Exception)):
            raise failures[0]

    async def __aenter__(self) -> Self:
        """See `__enter__`."""
        entering = asyncio.create_task(asyncio.to_thread(self.__enter__))
        try:
            return await asyncio.shield(entering)
        except asyncio.CancelledError:
            self.stop()
            await asyncio.wait([entering])
            if not entering.cancelled() and entering.exception() is None:
                await asyncio.to_thread(self._end)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """See `__exit__`."""
        await asyncio.to_thread(self.__exit__, kind, error, trace)

    @property
    def address(self) -> QueueAddress:
        """The address of the queue, with all of its controllers."""
        first, *others = (part.address for part in self._parts)
        return QueueAddress(
            endpoints=first.endpoints,
            host=first.host,
            token=first.token,
            others=[address.endpoints for address in others],
        )

    @property
    def connection(self) -> Path:
        """The file that holds the address."""
        return self._directory / "connection.json"

    @property
    def pids(self) -> dict[str, int]:
        """The pid of each process by name: `controller-0`, `controller-1`, …, `unit-0`, … It changes with a restart."""
        return {
            f"{CONTROLLER}-{number}" if name == CONTROLLER else name: pid
            for number, part in enumerate(self._parts)
            for name, pid in part.pids.items()
        }

    def stop(self) -> None:
        """See `QueueProcesses.stop`."""
        for part in self._parts:
            part.stop()

    def wait(self) -> None:
        """See `QueueProcesses.wait`."""
        for part in self._parts:
            part.wait()

    def on_given_up(self, then: Callable[[], object]) -> None:
        """See `QueueProcesses.on_given_up`."""
        self._on_given_up = then

    def _give_up(self, part: QueueProcesses) -> None:
        """Give up the whole queue, since one part was given up. Called in the thread of that part."""
        if self._giving_up.acquire(blocking=False):  # else another part was first
            self._first_given_up = part
            if self._on_given_up is not None:
                self._on_given_up()
            self.stop()

    def _end(self) -> list[TailraceError]:
        """End all processes. Return the errors of the parts that had been given up, with the first one first."""
        self.stop()
        failures: list[TailraceError] = []
        for part in sorted(self._parts, key=lambda part: part is not self._first_given_up):
            try:
                part.__exit__(None, None, None)
            except TailraceError as failure:
                failures.append(failure)
        return failures


def share_of(config: ServiceQueueConfig) -> ServiceQueueConfig:
    """The settings of one of several controllers: its share of what all have together."""
    count = config.controllers
    return config.model_copy(
        update={
            "controllers": 1,
            "units": config.units // count,
            "max_units": config.max_units and config.max_units // count,
            "max_rows": max(1, config.max_rows // count),
            "max_bytes": max(1, config.max_bytes // count),
        }
    )
