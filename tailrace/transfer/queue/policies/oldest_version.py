"""Rows one by one, those that the oldest weights have made before others."""

from tailrace.transfer.queue.policies.base import RowMeta
from tailrace.transfer.queue.policies.first_in import RowPolicy

_UNKNOWN = -1
"""Sorts before every version: those start at 0."""


class OldestVersionFirst(RowPolicy):
    """Up to `max_rows` ready rows, as soon as there is one: the smallest `version` first, then the smallest `order`.

    For an asynchronous run with bounded staleness (AsyncFlow): a row grows staler while it waits, and a response that
    took long, begun under old weights, joins the line late although it can wait least.

    A row without a version, since its response is empty, comes before all others: nothing says how old it is, so it is
    taken for the oldest and never starves.
    """

    name = "oldest_version"

    def __init__(self, max_rows: int) -> None:
        super().__init__(max_rows, key=_age)

    @property
    def columns(self) -> tuple[str, ...]:
        """See `Policy.columns`."""
        return ("weight_versions",)


def _age(row: RowMeta) -> tuple[int, int]:
    return (_UNKNOWN if row.version is None else row.version, row.order)
