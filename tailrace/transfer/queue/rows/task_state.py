"""What a row is to a task: a state, and those that may follow it."""

from enum import IntEnum


class TaskState(IntEnum):
    """The state of one row for one task."""

    WAITING = 0
    """Some input column is not written yet. Next: READY."""
    READY = 1
    """May be claimed. Next: LEASED."""
    LEASED = 2
    """Under a live lease. Next: CONSUMED by an ack, READY by a nack or when the lease expires."""
    CONSUMED = 3
    """Acked: the end."""


NEXT = ((TaskState.READY,), (TaskState.LEASED,), (TaskState.READY, TaskState.CONSUMED), ())
"""By state: those that may follow."""
