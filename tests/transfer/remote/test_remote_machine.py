"""The queue across processes gives every answer that a scan of all rows gives, over TCP and through shared memory."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tailrace.errors import LeaseError, QueueTimeout, StaleRowError
from tailrace.transfer.queue.base import Claim, NewRow, QueueStats, RowId, TaskStats
from tailrace.transfer.queue.client import put as client_put
from tailrace.transfer.queue.client import shared_memory as client_memory
from tailrace.transfer.queue.rows.table import QueueTask
from tailrace.transfer.queue.unit import service as unit_service
from tailrace.types import Value
from tests.helpers.effort import effort
from tests.transfer.client.servers import Make, Served, arena, memory, serving
from tests.transfer.machine import LEASE_S, QueueMachine
from tests.transfer.remote.clock import Clock
from tests.transfer.remote.faces import Face, remote
from tests.transfer.tables import tokens

FOREVER_S = 1e6
TCP = ("tcp://127.0.0.1:*",)


class RemoteDriver:
    """A queue of two units, and one client of it."""

    def __init__(self, tasks: Sequence[QueueTask], make: Make, endpoints: Sequence[str]) -> None:
        self._make = make
        self._endpoints = endpoints
        self._clock = Clock()
        self._stack = ExitStack()
        self.start(tasks)

    def start(self, tasks: Sequence[QueueTask]) -> None:
        self._served: Served = self._stack.enter_context(
            serving(
                Path(self._stack.enter_context(TemporaryDirectory())),
                make=self._make,
                units=2,
                tasks=tasks,
                endpoints=self._endpoints,
                clock=self._clock,
                lease_s=LEASE_S,
                unit_limit_s=FOREVER_S,
            )
        )
        self._queue: Face = self._stack.enter_context(remote(self._served.address, limit_s=FOREVER_S))

    def put(self, rows: Sequence[NewRow]) -> list[RowId]:
        ids: list[RowId] = self._queue.put(rows)
        return ids

    def claim(self, task: str, limit: int | None) -> tuple[Claim, list[RowId]] | None:
        try:
            claim = self._queue.claim(task, limit=limit, timeout=0)
        except QueueTimeout:
            return None
        return claim, [row.id for row in claim.rows]

    def ack(self, claim: Claim, sizes: Mapping[RowId, Mapping[str, int]]) -> None:
        cells: dict[RowId, dict[str, Value]] = {
            row: {column: 0.5 if column == "reward" else tokens(size) for column, size in columns.items()}
            for row, columns in sizes.items()
        }
        self._queue.ack(claim, cells)

    def nack(self, claim: Claim, rows: Sequence[RowId] | None) -> None:
        self._queue.nack(claim, rows)

    def renew(self, claim: Claim) -> None:
        self._queue.renew(claim)

    def advance(self, seconds: float) -> None:
        self._clock.jump(seconds)
        self._served.end_turn()

    def restart(self, tasks: Sequence[QueueTask]) -> None:
        snapshot = self._queue.snapshot()
        self._stack.close()
        self.start(tasks)
        self._queue.restore(snapshot)

    def stats(self) -> tuple[int, int, Mapping[str, TaskStats]]:
        stats: QueueStats = self._queue.stats()
        assert sum(unit.bytes for unit in stats.units) == stats.bytes
        assert stats.blocked_puts == 0
        return stats.rows, stats.bytes, {name: replace(task, wait_s=0.0) for name, task in stats.tasks.items()}

    def close(self) -> None:
        try:
            if self.stats()[0] == 0:
                while any(any(storage.parts()) for storage in self._served.storages):
                    self._queue.stats()  # rows that have left are settled a moment later
        finally:
            self._stack.close()


class RemoteMachine(QueueMachine):
    @precondition(lambda self: any(len(held.live) < len(held.rows) for held in self.held))
    @rule(data=st.data())
    def use_rows_that_are_not_held(self, data: st.DataObject) -> None:
        """Do as the base machine, but only with nacks: an ack is refused for its lack of outputs first."""
        held = data.draw(st.sampled_from([held for held in self.held if len(held.live) < len(held.rows)]))
        gone = data.draw(st.sampled_from([row_id for row_id in held.rows if row_id not in held.live]))
        with pytest.raises(LeaseError if gone in self.model.rows else StaleRowError):
            self.driver.nack(held.claim, [*held.live, gone])


class TcpMachine(RemoteMachine):
    def make_driver(self, tasks: Sequence[QueueTask]) -> RemoteDriver:
        return RemoteDriver(tasks, memory, TCP)


class ArenaMachine(RemoteMachine):
    """A machine whose cells pass through shared memory, however short they are."""

    def make_driver(self, tasks: Sequence[QueueTask]) -> RemoteDriver:
        with ExitStack() as stack:
            stack.enter_context(patch.object(client_put, "SMALL_BYTES", -1))
            stack.enter_context(patch.object(client_memory, "_WORTHWHILE", 0))
            stack.enter_context(patch.object(unit_service, "_SHARED_BYTES", 0))
            self.patches = stack.pop_all()
        return RemoteDriver(tasks, arena, ("ipc://*",))

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self.patches.close()


SETTINGS = settings(max_examples=effort(15, 6), stateful_step_count=40)
TestOverTcp = TcpMachine.TestCase
TestOverTcp.settings = SETTINGS
TestThroughSharedMemory = ArenaMachine.TestCase
TestThroughSharedMemory.settings = SETTINGS
