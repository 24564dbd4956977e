"""A queue whose processes are killed at random, as are its producers and consumers. An auditor counts the rows.

    producers ──prompts──▶ queue ──work──▶ consumers ──responses──▶ queue ──audit──▶ Auditor: each row once, and right
                             └──lost groups──▶ Feeder: puts them again

The moment of a kill is a number of audited groups: nothing here waits for time to pass.
"""

import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tailrace.errors import PeerLost
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.client.directory import endpoint
from tailrace.transfer.queue.client.look import read_stats, read_table
from tailrace.transfer.queue.client.sync_queue import SyncQueue
from tailrace.transfer.queue.controller.journal import Base, Change, Journal, PutAdmitted, RowsAcked, RowsLeased
from tailrace.transfer.queue.messages import QUEUE, Inventory, Parts, row_ids, unpack
from tailrace.transfer.queue.processes.several import SeveralProcesses
from tailrace.transfer.queue.processes.supervisor import QueueProcesses
from tailrace.transfer.wire.calls import Call, Operation, ask
from tailrace.transfer.wire.sync import SyncClient
from tests.helpers.waiting import until
from tests.transfer.faults.auditor import Auditor, Feeder
from tests.transfer.faults.worker import TIMEOUT_S
from tests.transfer.faults.workers import Workers

UNITS = ("unit-0", "unit-1")
WORKERS = {
    "producer-0": "produce 0 {groups} 2",
    "producer-1": "produce 1 {groups} 2",
    "consumer-0": "consume",
    "consumer-1": "consume",
}
Processes = QueueProcesses | SeveralProcesses


class Chaos:
    """The queue, its workers and its auditor, and the choice of what to kill."""

    def __init__(self, processes: Processes, workers: Workers, seed: int) -> None:
        self._processes = processes
        self._controllers = _controllers(processes)
        """The journal of each controller, by name."""
        self._victims = [*WORKERS, *WORKERS, *self._controllers, *self._controllers, *UNITS]
        """The processes to kill. Those that are costly to restart are named less often."""
        self._workers = workers
        self._random = random.Random(seed)
        self._first = sorted({*self._victims})
        self._random.shuffle(self._first)
        """The victims that are still to be killed for the first time."""
        self._killed: dict[str, int] = {}
        """The last process that was killed, by name of the queue's process."""
        self._journals: dict[str, list[Path]] = {name: [] for name in self._controllers}
        self.deaths: Counter[str] = Counter()
        """The number of kills, by name."""
        self.auditor = Auditor(processes.address)
        self.feeder = Feeder(processes.address)

    def round(self, *, units_may_die: Callable[[], bool] = lambda: True) -> None:
        """Kill a process after some more groups."""
        self._audit(self._random.randint(0, 4))
        victim = self._first.pop() if self._first else self._random.choice(self._victims)
        if victim in UNITS and not units_may_die():
            victim = next(filter(self._is_there, self._controllers), "producer-0")
        until(lambda: self._is_there(victim))
        self._kill(victim)

    def end(self, groups: int) -> None:
        """Audit the remaining groups, check that all came and that nothing is left, and close the queue."""
        while len(self.auditor.groups | self.auditor.doubtful) < groups:
            self.auditor.audit()
        address = self._processes.address
        stats = read_stats(address, name="test", limit_s=TIMEOUT_S)
        assert (stats.rows, stats.bytes, stats.lost_groups, stats.blocked_puts) == (0, 0, 0, 0)
        assert {(unit.rows, unit.bytes) for unit in stats.units if unit.alive} == {(0, 0)}
        until(lambda: not any(self._inventories()))
        with SyncQueue(address, name="test") as queue:
            queue.close()
        self.feeder.join()
        self.auditor.close()
        for controller in self._controllers:
            self._keep_journal(controller)

    def acks(self) -> Counter[tuple[str, RowId, int]]:
        """The acks in the journals of all controllers: task, row and the row's order."""
        acks: Counter[tuple[str, RowId, int]] = Counter()
        for journals in self._journals.values():
            acks += _acks(record for path in journals for record in Journal(path).records())
        return acks

    def all_rows_are_on_both_units(self) -> bool:
        """Whether either unit may die now without the loss of a row."""
        try:
            stats = read_stats(self._processes.address, name="test", limit_s=1.0)
        except PeerLost:
            return False
        return [unit.rows for unit in stats.units if unit.alive] == [stats.rows] * 2

    def has_rows(self, unit: str) -> bool:
        """Whether the unit has rows; False while a controller is away."""
        try:
            stats = read_stats(self._processes.address, name="test", limit_s=1.0)
        except PeerLost:
            return False
        return any(each.rows for each in stats.units if each.name == unit)

    def _audit(self, groups: int) -> None:
        while groups > 0:
            groups -= self.auditor.audit()

    def _kill(self, victim: str) -> None:
        self.deaths[victim] += 1
        if victim in WORKERS:
            self._workers.kill(victim)
            return
        if victim in self._controllers:
            self._keep_journal(victim)
        self._killed[victim] = self._processes.pids[victim]
        os.kill(self._killed[victim], signal.SIGKILL)

    def _is_there(self, victim: str) -> bool:
        """Whether the process lives: if it was killed, whether another has taken its place. A unit may have left."""
        return victim in WORKERS or self._processes.pids.get(victim) not in (None, self._killed.get(victim))

    def _keep_journal(self, controller: str) -> None:
        """Link a controller's journal under a second name, since the next controller begins a new one."""
        journal, kept = self._controllers[controller], self._journals[controller]
        kept.append(journal.with_name(f"journal-{len(kept)}"))
        os.link(journal, kept[-1])

    def _inventories(self) -> list[bytes]:
        """The parts that each unit stores, packed."""
        address = self._processes.address
        units = [unit for one in address.each for unit in read_table(one, name="test", limit_s=TIMEOUT_S).units]
        with SyncClient("test", address.token, QUEUE) as client:
            return [client.run(_inventory(endpoint(unit))).parts for unit in units]


def _controllers(processes: Processes) -> dict[str, Path]:
    """The journal of each controller, by the controller's name."""
    journal = processes.connection.with_name("journal")
    names = [name for name in processes.pids if name.startswith("controller")]
    if len(names) == 1:
        return {names[0]: journal}
    return {name: journal.parent / f"shard-{number}" / journal.name for number, name in enumerate(names)}


@contextmanager
def chaos(processes: Processes, *, groups: int, seed: int) -> Iterator[Chaos]:
    """Run producers, consumers and the auditor on the queue. The producers share `groups`."""
    roles = {name: words.format(groups=groups) for name, words in WORKERS.items()}
    with Workers(processes.connection, roles) as workers:
        yield Chaos(processes, workers, seed)


def _inventory(to: str) -> Operation[Parts]:
    return (yield from ask(Call(to, Inventory()), Parts))


def _acks(records: Iterable[Base | Change]) -> Counter[tuple[str, RowId, int]]:
    orders: dict[RowId, int] = {}
    tasks: dict[int, str] = {}
    acks: Counter[tuple[str, RowId, int]] = Counter()
    for record in records:
        match record:
            case PutAdmitted(rows=rows, request=request):
                orders |= zip(row_ids(rows), unpack(request.rows, 3)[:, 2].tolist(), strict=True)
            case RowsLeased(lease_id=lease_id, task=task):
                tasks[lease_id] = task
            case RowsAcked(request=ack):
                acks.update((tasks[ack.lease_id], row, orders[row]) for row in row_ids(ack.rows))
    return acks
