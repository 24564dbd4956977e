from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import settings
from hypothesis.stateful import rule

from tailrace.errors import QueueTimeout
from tailrace.transfer.queue.base import NewRow, QueueStats, RowId, TaskStats
from tailrace.transfer.queue.messages import (
    NO_VERSION,
    Ack,
    Admit,
    Admitted,
    Claim,
    Claimed,
    Export,
    Nack,
    Release,
    Renew,
    Restore,
    Run,
    Stats,
    Written,
    pack,
    row_ids,
    unpack,
)
from tailrace.transfer.queue.rows.table import QueueTask
from tailrace.transfer.queue.storage.base import PartId
from tests.helpers.effort import effort
from tests.transfer.controller.fakes import FakeUnit, Site
from tests.transfer.machine import LEASE_S, QueueMachine


def ints(values: Sequence[Sequence[int]]) -> bytes:
    return pack(np.array(values, dtype=np.int64))


def one_run(columns: Mapping[str, int], rows: int) -> list[Run]:
    return [Run(rows, list(columns), ints([list(columns.values())] * rows))] if columns else []


def admit(rows: Sequence[NewRow]) -> Admit:
    return Admit(
        rows=ints([(row.group_id, row.group_size, row.order) for row in rows]),
        versions=ints([[NO_VERSION]] * len(rows)),
        runs=[run for row in rows for run in one_run({name: len(value) for name, value in row.cells.items()}, 1)],  # type: ignore[arg-type]
        not_before=max(row.not_before for row in rows),
        wait_s=0.0,
    )


class ControllerDriver:
    """A controller and two units without sockets. A claim is its lease id."""

    def __init__(self, tasks: Sequence[QueueTask]) -> None:
        self._tasks = list(tasks)
        self._folders = [TemporaryDirectory()]
        self.site = self.make()

    def make(self) -> Site:
        units = [FakeUnit("a"), FakeUnit("b")]
        folder = Path(self._folders[-1].name)
        return Site(lambda: self._tasks, folder, units=units, lease_s=LEASE_S, unit_limit_s=1e6)

    def write(self, units: Sequence[int], rows: Sequence[RowId], tag: int) -> None:
        for number in units:
            self.site.unit(number).parts.update(PartId(*row, tag) for row in rows)

    def put(self, rows: Sequence[NewRow]) -> list[RowId]:
        admitted: Admitted = self.site.ask(admit(rows))
        ids = row_ids(admitted.rows)
        self.write(admitted.units, ids, 0)
        for number in admitted.units:
            self.site.ask(Written(number, admitted.rows))
        return ids

    def claim(self, task: str, limit: int | None) -> tuple[int, list[RowId]] | None:
        try:
            claimed: Claimed = self.site.ask(Claim(task, limit, None, 0.0))
        except QueueTimeout:
            return None
        rows = [RowId(slot, generation) for slot, generation, _, _ in unpack(claimed.rows, 4).tolist()]
        units = unpack(claimed.units, claimed.width).tolist()
        for row, row_units, tags in zip(rows, units, unpack(claimed.tags, len(claimed.columns)).tolist(), strict=True):
            for tag in tags:
                assert all(PartId(*row, tag) in self.site.unit(number).parts for number in row_units), "nothing to read"
        return claimed.lease_id, rows

    def ack(self, claim: int, sizes: Mapping[RowId, Mapping[str, int]]) -> None:
        rows, columns = list(sizes), next(iter(sizes.values()), {})
        stats = self.site.controller._context.control
        for row in rows if columns else ():
            self.write(stats.units(row), [row], claim)
        versions = ints([[NO_VERSION]] * len(rows))
        self.site.ask(Ack(claim, pack(rows), versions, one_run(columns, len(rows)), []))

    def nack(self, claim: int, rows: Sequence[RowId] | None) -> None:
        self.site.ask(Nack(claim, None if rows is None else pack(rows)))

    def renew(self, claim: int) -> None:
        self.site.ask(Renew(claim))

    def advance(self, seconds: float) -> None:
        self.site.tick(seconds)

    def restart(self, tasks: Sequence[QueueTask]) -> None:
        exported = self.site.ask(Export())
        self.site.ask(Release(exported.hold))
        self.site.end()
        self._tasks = list(tasks)
        self._folders.append(TemporaryDirectory())
        now, self.site = self.site.now, self.make()
        self.site.tick(now)
        admitted = self.site.ask(Restore(exported.state))
        self.write(admitted.units, row_ids(admitted.rows), 0)
        for number in admitted.units:
            self.site.ask(Written(number, admitted.rows))

    def crash(self, tasks: Sequence[QueueTask]) -> None:
        """Kill and restart the controller, and assert that its earlier answers are the same.

        The answer to a claim may have fewer rows: it names those still leased. A client that acked some had its answer.
        """
        answers = dict(self.site.server.answers)
        self._tasks = list(tasks)
        self.site.start()
        for ticket, answer in self.site.server.answers.items():
            before = answers.get(ticket, answer)
            if isinstance(before, Claimed) and isinstance(answer, Claimed):
                assert answer.lease_id == before.lease_id
            else:
                assert answer == before

    def stats(self) -> tuple[int, int, Mapping[str, TaskStats]]:
        stats: QueueStats = self.site.ask(Stats()).stats
        assert sum(unit.bytes for unit in stats.units) == stats.bytes
        tasks = {
            name: TaskStats(
                waiting=task.waiting,
                ready=task.ready,
                leased=task.leased,
                consumed=task.consumed,
                expired=task.expired,
            )
            for name, task in stats.tasks.items()
        }
        return stats.rows, stats.bytes, tasks

    def close(self) -> None:
        self.site.tick(1.0)
        if self.stats()[0] == 0:
            assert not any(unit.parts for unit in self.site.units), "units keep what nobody will read"
        self.site.end()
        for folder in self._folders:
            folder.cleanup()


class ControllerMachine(QueueMachine):
    driver: ControllerDriver

    def make_driver(self, tasks: Sequence[QueueTask]) -> ControllerDriver:
        return ControllerDriver(tasks)

    @rule()
    def crash(self) -> None:
        """A controller's death loses nothing, not even leases. Their time limits restart."""
        self.driver.crash(self.tasks())
        for held in self.held:
            held.deadline = self.now + LEASE_S
        self.model.arrivals.clear()
        self.model.update()


TestControllerEqualsAScan = ControllerMachine.TestCase
TestControllerEqualsAScan.settings = settings(max_examples=effort(120, 40), stateful_step_count=40)
