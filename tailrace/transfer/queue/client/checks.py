"""Argument checks of `RemoteQueue` and `SyncQueue` before anything is sent. Each error is one line."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

from tailrace.errors import QueueError, UserError
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.base import NewRow, RowId
from tailrace.transfer.queue.rows.schema import check_integer, check_limit, is_int64

_MAX_SECONDS = 1e9
"""The largest number of seconds that a message can hold, see `messages.Seconds`: over 30 years."""


class Owner:
    """The process that made a client. A process that was forked from it cannot use its sockets."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether the current process made the client."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Check that the current process made the client.

        Raises:
            QueueError: another process made it.
        """
        if not self.is_here:
            raise QueueError(
                f"this client of the queue was made in process {self._pid} and cannot be used in process "
                f"{os.getpid()}, which was forked from it; make one in each process"
            )


def check_address(address: QueueAddress) -> None:
    """Check that `address` is a QueueAddress, and not a path to one.

    Raises:
        UserError: it is anything else.
    """
    if not isinstance(address, QueueAddress):
        raise UserError(f"got {address!r:.80}, expected a QueueAddress: QueueAddress.read(path)")


def seconds(name: str, value: float) -> float:
    """Return the argument `name` as seconds to wait. A negative `value`, such as the rest of a limit, counts as 0.

    Raises:
        QueueError: `value` is not a number, or larger than a message can hold.
    """
    if not isinstance(value, Real) or math.isnan(value) or value > _MAX_SECONDS:
        raise QueueError(f"{name}: got {value!r:.80}, expected 0 to {_MAX_SECONDS:g} seconds")
    return max(0.0, float(value))


def limit_seconds(value: float) -> float:
    """Return a client's `limit_s` in seconds.

    Raises:
        QueueError: `value` is not above 0, or see `seconds`.
    """
    if limit_s := seconds("limit_s", value):
        return limit_s
    raise QueueError(f"limit_s: got {value!r:.80}, expected more than 0 seconds")


def check_remake(groups: Iterable[int], most: int) -> None:
    """Check the arguments of `remake`.

    Raises:
        QueueError: a number is not an integer, or `most` is below 0.
    """
    for group_id in groups:
        check_integer("groups", group_id)
    check_integer("most", most)
    if most < 0:
        raise QueueError(f"most: got {most}, expected 0 or more")


def check_claim(task: str, limit: int | None, rank: int | None) -> None:
    """Check the arguments of a claim.

    Raises:
        QueueError: `task` is not a string, `limit` is below 1, or `limit` or `rank` is not an integer.
    """
    if not isinstance(task, str):
        raise QueueError(f"task: got {task!r:.80}, expected the name of a task")
    check_limit(limit)
    if rank is not None:
        check_integer("rank", rank)


def check_rows(rows: Sequence[NewRow]) -> None:
    """Check that `rows` is a sequence, which can be iterated over more than once.

    Raises:
        QueueError: it is not a sequence.
    """
    if not isinstance(rows, Sequence):
        raise QueueError(f"rows: got {type(rows).__name__} {rows!r:.80}, expected a list of NewRow")


def check_output_rows(outputs: Mapping[RowId, Any]) -> None:
    """Check that `outputs` is a mapping by row id.

    Raises:
        QueueError: it is not.
    """
    if not isinstance(outputs, Mapping):
        raise QueueError(f"outputs: got {type(outputs).__name__} {outputs!r:.80}, expected a mapping by RowId")
    check_row_ids(outputs)


def check_row_ids(rows: Iterable[RowId]) -> None:
    """Check that `rows` are row ids.

    Raises:
        QueueError: one of them is not.
    """
    for row in rows:
        if not (isinstance(row, tuple) and len(row) == 2 and is_int64(row[0]) and is_int64(row[1])):
            raise QueueError(f"got {row!r:.80} for a row, expected its RowId: row.id of a row of the claim")
