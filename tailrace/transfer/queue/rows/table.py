"""The table of a queue: its tasks, what each reads and writes, and how each chooses rows."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tailrace.errors import QueueError
from tailrace.transfer.queue.policies.base import Policy
from tailrace.transfer.queue.rows.schema import put_columns
from tailrace.types import TaskSpec


@dataclass(frozen=True, slots=True)
class QueueTask:
    """A task of a queue with the policy that chooses its rows. A policy serves one task only."""

    spec: TaskSpec
    policy: Policy


def check_table(tasks: Sequence[QueueTask], columns: Collection[str]) -> None:
    """Refuse a table in which a row could never pass every task.

    Raises:
        QueueError: there is no task, a name or a policy is used twice, a column is unknown or has two writers, a policy
            needs a column that its task does not read, or tasks wait for each other's outputs.
    """
    _check_distinct(tasks)
    for task in tasks:
        _check_columns(task, columns)
    _check_writers(tasks)
    _check_reachable(tasks)


def _check_distinct(tasks: Sequence[QueueTask]) -> None:
    if not tasks:
        raise QueueError("a queue needs at least one task")
    names = [task.spec.name for task in tasks]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise QueueError(f"task {twice[0]!r} is in the table twice; names must be unique")
    if len({id(task.policy) for task in tasks}) < len(tasks):
        raise QueueError("two tasks share one policy object; make one for each task")


def _check_columns(task: QueueTask, columns: Collection[str]) -> None:
    name = task.spec.name
    for verb, used in (("reads", task.spec.reads), ("writes", task.spec.writes)):
        if unknown := sorted(set(used).difference(columns)):
            raise QueueError(
                f"task {name!r} {verb} {unknown[0]!r}, which is no column of the queue; known: {sorted(columns)}"
            )
    if unread := sorted(set(task.policy.columns).difference(task.spec.reads)):
        raise QueueError(
            f"the policy of task {name!r} looks at {unread[0]!r}, which the task does not read; "
            f"add it to the task's reads"
        )


def _check_writers(tasks: Sequence[QueueTask]) -> None:
    for column, writers in _writers(tasks).items():
        if len(writers) > 1:
            raise QueueError(f"column {column!r} is written by tasks {writers}; it may have one writer")


def _check_reachable(tasks: Sequence[QueueTask]) -> None:
    known = set(put_columns(task.spec for task in tasks))
    blocked = list(tasks)
    while runnable := [task for task in blocked if known.issuperset(task.spec.reads)]:
        known.update(column for task in runnable for column in task.spec.writes)
        blocked = [task for task in blocked if task not in runnable]
    if blocked:
        names = [task.spec.name for task in blocked]
        raise QueueError(f"tasks {names} wait for each other's outputs (or their own): no row could ever be ready")


def _writers(tasks: Sequence[QueueTask]) -> dict[str, list[str]]:
    writers: dict[str, list[str]] = {}
    for task in tasks:
        for column in dict.fromkeys(task.spec.writes):
            writers.setdefault(column, []).append(task.spec.name)
    return writers
