"""Checks of puts, claims and acks that follow from a queue's table, and the errors of those that waited too long."""

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tailrace.errors import ColumnError, QueueError, QueueTimeout, did_you_mean, nearest
from tailrace.transfer.queue.base import NewRow, RowId, TaskStats
from tailrace.types import TaskSpec, Value, WeightVersion

if TYPE_CHECKING:
    from tailrace.config.transfer import LocalQueueConfig, ServiceQueueConfig

RAISE_LIMIT = "if the work before it takes that long, raise its timeout (of a run: queue.timeout_s)"
"""The fix that the errors of late puts and claims name."""

_MAX_SOUND = 1024


def late_put(rows: int, limit_s: float, obstacle: str) -> QueueTimeout:
    """The error of a put of `rows` rows that has waited `limit_s` seconds. `obstacle`: the reason, in words."""
    return QueueTimeout(f"put of {rows} rows waited {limit_s:g} s: {obstacle}; {RAISE_LIMIT}")


def late_claim(task: str, rank: int | None, limit_s: float, counts: TaskStats) -> QueueTimeout:
    """The error of a claim that has waited `limit_s` seconds. `counts`: the counts of its task."""
    whose = f"task {task!r}" if rank is None else f"rank {rank} of task {task!r}"
    return QueueTimeout(
        f"claim of {whose} waited {limit_s:g} s: of its rows {counts.waiting} lack inputs, {counts.ready} are "
        f"ready and {counts.leased} leased; {RAISE_LIMIT}"
    )


class Schema:
    """The columns that come with a put, and those that come with each task's ack."""

    def __init__(self, tasks: Sequence[TaskSpec]) -> None:
        self.tasks = tuple(tasks)
        self._by_name = {task.name: task for task in tasks}
        self._put = put_columns(tasks)
        self._written = {column for task in tasks for column in task.writes}
        self._sound: set[tuple[str, ...]] = set()
        """Sets of columns that were checked and found valid: most rows have the same columns as earlier ones."""

    def task(self, name: str) -> TaskSpec:
        """The task of that name.

        Raises:
            QueueError: there is no such task.
        """
        if name not in self._by_name:
            raise QueueError(f"no task {name!r} in the table; its tasks are {sorted(self._by_name)}")
        return self._by_name[name]

    def check_new(self, rows: Iterable[NewRow]) -> None:
        """Check that each row brings all columns that a task reads and none writes, and no column that a task writes.

        Raises:
            ColumnError: a row lacks such a column, or brings one that a task writes.
            QueueError: an item is no NewRow, or its numbers are no integers of 64 bits.
        """
        for row in rows:
            if not isinstance(row, NewRow):
                raise QueueError(f"got {type(row).__name__} {row!r:.80} for a row, expected a NewRow")
            if not (
                is_int64(row.group_id) and is_int64(row.group_size) and is_int64(row.order) and is_int64(row.not_before)
            ):
                _refuse_numbers(row)
            if tuple(row.cells) not in self._sound:
                self._check_columns(row)

    def _check_columns(self, row: NewRow) -> None:
        if not isinstance(row.cells, Mapping) or not all(isinstance(column, str) for column in row.cells):
            raise ColumnError(f"{_place(row)}: got cells {row.cells!r:.80}, expected values by the names of columns")
        columns = tuple(row.cells)
        if missing := sorted(self._put.difference(columns)):
            near = nearest(missing[0], set(columns) - self._put)
            instead = "" if near is None else f"; it brings {near!r}: did you mean {missing[0]!r}?"
            raise ColumnError(f"{_place(row)} lacks column {missing[0]!r}, which tasks read and none writes{instead}")
        if written := sorted(self._written.intersection(columns)):
            raise ColumnError(f"{_place(row)} brings column {written[0]!r}, which a task writes; leave it out")
        if len(self._sound) < _MAX_SOUND:
            self._sound.add(columns)


def _refuse_numbers(row: NewRow) -> None:
    for name in ("group_id", "group_size", "order", "not_before"):
        check_integer(f"{name} of a row", getattr(row, name))


def _place(row: NewRow) -> str:
    return f"row {row.order} of group {row.group_id}"


def put_columns(tasks: Iterable[TaskSpec]) -> frozenset[str]:
    """The columns that a task reads and none writes: every row brings them when it is put."""
    tasks = list(tasks)
    read = {column for task in tasks for column in task.reads}
    return frozenset(read.difference(*(task.writes for task in tasks)))


def check_outputs(task: TaskSpec, row: RowId, columns: Collection[str]) -> None:
    """Check that `columns`, which `task` acks for a row, are exactly the task's outputs.

    Raises:
        ColumnError: they are not.
    """
    expected, got = set(task.writes), set(columns)
    if expected != got:
        missing, foreign = sorted(expected - got), sorted(map(str, got - expected))
        wrong = [f"missing: {missing}"] if missing else []
        wrong += [f"not its own: {foreign}"] if foreign else []
        hint = did_you_mean(foreign[0], missing) if foreign else ""
        raise ColumnError(f"{row}: task {task.name!r} writes {sorted(expected)}; {', '.join(wrong)}{hint}")


def check_capacity(rows: int, nbytes: int, config: "LocalQueueConfig | ServiceQueueConfig") -> None:
    """Check that an empty queue would have room for a put.

    Raises:
        QueueError: it would not.
    """
    for name, amount, bound in (("max_rows", rows, config.max_rows), ("max_bytes", nbytes, config.max_bytes)):
        if amount > bound:
            raise QueueError(f"a put of {rows} rows and {nbytes} bytes can never fit queue.{name} {bound}")


def check_unit(rows: int, nbytes: int, most: int) -> None:
    """Check that an empty unit of `most` bytes would have room for a put, which each of its units stores whole.

    Raises:
        QueueError: it would not.
    """
    if nbytes > most:
        raise QueueError(
            f"a put of {rows} rows and {nbytes} bytes can never fit a storage unit: raise queue.storage.max_bytes, "
            f"{most}, or put fewer or shorter rows at once"
        )


def check_limit(limit: int | None) -> None:
    """Check the limit of a claim.

    Raises:
        QueueError: it is less than 1, or no integer of 64 bits.
    """
    if limit is None:
        return
    check_integer("a claim's limit", limit)
    if limit < 1:
        raise QueueError(f"a claim's limit must be at least 1, got {limit}")


def oldest_version(cells: Mapping[str, Value]) -> WeightVersion | None:
    """The smallest entry of `weight_versions`; None where that column is not among `cells`, or is empty."""
    versions = cells.get("weight_versions")
    return int(versions.min()) if isinstance(versions, np.ndarray) and versions.size else None


def is_int64(number: object) -> bool:
    """Whether `number` is a signed integer of 64 bits, of Python or of a library such as numpy; a bool is none."""
    if type(number) is not int:
        if isinstance(number, bool):
            return False
        try:
            number = operator.index(number)  # type: ignore[arg-type]
        except TypeError:
            return False
    return -(2**63) <= number < 2**63


def check_integer(name: str, value: int) -> None:
    """Check that `value`, which the error calls `name`, is a signed integer of 64 bits.

    Raises:
        QueueError: it is not.
    """
    if not is_int64(value):
        raise QueueError(f"{name}: got {value!r:.80}, expected an integer of 64 bits, signed")
