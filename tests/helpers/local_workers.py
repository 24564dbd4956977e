"""Separated runs without processes of their own: workers are tasks of the event loop, the queue is in threads."""

import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from tailrace.cluster.local import LocalCluster
from tailrace.config.queue_table import TableConfig
from tailrace.config.transfer import ServiceQueueConfig
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.processes.several import share_of
from tailrace.transfer.queue.table_factory import make_tasks
from tests.transfer.client.servers import memory, serving_several


class QueueThreads:
    """Stands in for `QueueProcesses` where none of these is to die. Each would take half a second to start."""

    def __init__(self, config: ServiceQueueConfig, table: TableConfig, directory: Path) -> None:
        self._config, self._table = config, table
        self._stack = AsyncExitStack()
        self._address: QueueAddress

    async def __aenter__(self) -> Self:
        directory, count = self._stack.enter_context(tempfile.TemporaryDirectory()), self._config.controllers
        self._address, _ = self._stack.enter_context(
            serving_several(
                Path(directory),
                lambda: make_tasks(self._table, controllers=count),
                controllers=count,
                make=memory,
                columns=self._table.columns,
                **share_of(self._config).model_dump(exclude={"listen", "controllers"}),
            )
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @property
    def address(self) -> QueueAddress:
        return self._address

    def on_given_up(self, then: Callable[[], object]) -> None:
        """Threads are not given up."""


def use_local_workers(patch: pytest.MonkeyPatch) -> list[LocalCluster]:
    """Have separated runs start no worker and no queue processes. Return the list that their clusters will be in."""
    made: list[LocalCluster] = []

    def make_cluster(config: Any, _: Any) -> LocalCluster:
        made.append(LocalCluster(config))
        return made[-1]

    patch.setattr("tailrace.run.separated.make_cluster", make_cluster)
    patch.setattr("tailrace.run.queue.queue_processes", QueueThreads)
    return made
