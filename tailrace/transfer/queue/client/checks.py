"""What both faces of the client refuse before anything is sent, each as one line that names the argument."""

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
"""What a message takes, see `messages.Seconds`: over 30 years."""


class Owner:
    """The process that made a client. Its sockets are of no use to one that was forked from it."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Whether this is that process.

        Raises:
            QueueError: it is not.
        """
        if not self.is_here:
            raise QueueError(
                f"this client of the queue was made in process {self._pid} and cannot be used in process "
                f"{os.getpid()}, which was forked from it; make one in each process"
            )


def check_address(address: QueueAddress) -> None:
    """Whether `address` is one, and not the path of one.

    Raises:
        UserError: it is not.
    """
    if not isinstance(address, QueueAddress):
        raise UserError(f"got {address!r:.80}, expected a QueueAddress: QueueAddress.read(path)")


def seconds(name: str, value: float) -> float:
    """`value`, which is called `name`, as seconds to wait; none where it is negative: what is left of a limit may be.

    Raises:
        QueueError: it is no number, or more than a message takes.
    """
    if not isinstance(value, Real) or math.isnan(value) or value > _MAX_SECONDS:
        raise QueueError(f"{name}: got {value!r:.80}, expected 0 to {_MAX_SECONDS:g} seconds")
    return max(0.0, float(value))


def limit_seconds(value: float) -> float:
    """`limit_s` of a client.

    Raises:
        QueueError: it is not more than 0, or as for `seconds`.
    """
    if limit_s := seconds("limit_s", value):
        return limit_s
    raise QueueError(f"limit_s: got {value!r:.80}, expected more than 0 seconds")


def check_claim(task: str, limit: int | None, rank: int | None) -> None:
    """Whether a claim can be asked for.

    Raises:
        QueueError: the task has no name, `limit` is below 1, or one of the numbers is none.
    """
    if not isinstance(task, str):
        raise QueueError(f"task: got {task!r:.80}, expected the name of a task")
    check_limit(limit)
    if rank is not None:
        check_integer("rank", rank)


def check_rows(rows: Sequence[NewRow]) -> None:
    """Whether `rows` can be gone through more than once.

    Raises:
        QueueError: they cannot.
    """
    if not isinstance(rows, Sequence):
        raise QueueError(f"rows: got {type(rows).__name__} {rows!r:.80}, expected a list of NewRow")


def check_output_rows(outputs: Mapping[RowId, Any]) -> None:
    """Whether `outputs` are those of rows.

    Raises:
        QueueError: they are not.
    """
    if not isinstance(outputs, Mapping):
        raise QueueError(f"outputs: got {type(outputs).__name__} {outputs!r:.80}, expected a mapping by RowId")
    check_row_ids(outputs)


def check_row_ids(rows: Iterable[RowId]) -> None:
    """Whether `rows` are ids of rows.

    Raises:
        QueueError: one is not.
    """
    for row in rows:
        if not (isinstance(row, tuple) and len(row) == 2 and is_int64(row[0]) and is_int64(row[1])):
            raise QueueError(f"got {row!r:.80} for a row, expected its RowId: row.id of a row of the claim")
