"""What a table says of the cells of its rows, wherever they are put or acked."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from tailrace.config.transfer import LocalQueueConfig, ServiceQueueConfig
from tailrace.errors import ColumnError, QueueError
from tailrace.transfer.queue.base import NewRow, RowId
from tailrace.types import TaskSpec, Value, WeightVersion

_MAX_SOUND = 1024


class Schema:
    """Which columns come with a put, and which with the ack of which task."""

    def __init__(self, tasks: Sequence[TaskSpec]) -> None:
        self.tasks = tuple(tasks)
        self._by_name = {task.name: task for task in tasks}
        self._put = put_columns(tasks)
        self._written = {column for task in tasks for column in task.writes}
        self._sound: set[tuple[str, ...]] = set()
        """Columns that rows have come with and may: most rows are like those before."""

    def task(self, name: str) -> TaskSpec:
        """The task of that name.

        Raises:
            QueueError: there is none.
        """
        if name not in self._by_name:
            raise QueueError(f"no task {name!r} in the table; its tasks are {sorted(self._by_name)}")
        return self._by_name[name]

    def check_new(self, rows: Iterable[NewRow]) -> None:
        """Whether each of `rows` brings what some task reads and none writes, and nothing that a task writes.

        Raises:
            ColumnError: one does not.
            QueueError: its numbers are not of 64 bits.
        """
        for row in rows:
            if not (_is_int64(row.group_id) and _is_int64(row.group_size) and _is_int64(row.order)):
                raise QueueError(
                    f"{_place(row)} of group_size {row.group_size}: expected integers of 64 bits, signed, for all three"
                )
            if tuple(row.cells) not in self._sound:
                self._check_columns(row)

    def _check_columns(self, row: NewRow) -> None:
        columns = tuple(row.cells)
        if missing := sorted(self._put.difference(columns)):
            raise ColumnError(f"{_place(row)} lacks column {missing[0]!r}, which tasks read and none writes")
        if written := sorted(self._written.intersection(columns)):
            raise ColumnError(f"{_place(row)} brings column {written[0]!r}, which a task writes; leave it out")
        if len(self._sound) < _MAX_SOUND:
            self._sound.add(columns)


def _is_int64(number: int) -> bool:
    return -(2**63) <= number < 2**63


def _place(row: NewRow) -> str:
    return f"row {row.order} of group {row.group_id}"


def put_columns(tasks: Iterable[TaskSpec]) -> frozenset[str]:
    """Columns that a task reads and none writes: every row brings them when it is put."""
    tasks = list(tasks)
    read = {column for task in tasks for column in task.reads}
    return frozenset(read.difference(*(task.writes for task in tasks)))


def check_outputs(task: TaskSpec, row: RowId, columns: Collection[str]) -> None:
    """Whether a row that `task` acks comes with exactly the task's outputs.

    Raises:
        ColumnError: it does not.
    """
    expected, got = set(task.writes), set(columns)
    if expected != got:
        raise ColumnError(
            f"{row}: task {task.name!r} writes {sorted(expected)}; "
            f"missing: {sorted(expected - got)}, not its own: {sorted(got - expected)}"
        )


def check_capacity(rows: int, nbytes: int, config: LocalQueueConfig | ServiceQueueConfig) -> None:
    """Whether an empty queue had room for a put.

    Raises:
        QueueError: it had not.
    """
    for name, amount, bound in (("max_rows", rows, config.max_rows), ("max_bytes", nbytes, config.max_bytes)):
        if amount > bound:
            raise QueueError(f"a put of {rows} rows and {nbytes} bytes can never fit queue.{name} {bound}")


def check_limit(limit: int | None) -> None:
    """Whether a claim may ask for so many rows.

    Raises:
        QueueError: fewer than 1.
    """
    if limit is not None and limit < 1:
        raise QueueError(f"a claim's limit must be at least 1, got {limit}")


def oldest_version(cells: Mapping[str, Value]) -> WeightVersion | None:
    """The smallest entry of `weight_versions`; None where that is not among `cells`, or empty."""
    versions = cells.get("weight_versions")
    return int(versions.min()) if isinstance(versions, np.ndarray) and versions.size else None
