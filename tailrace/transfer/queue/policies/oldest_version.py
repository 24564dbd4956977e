"""The policy `oldest_version`: single rows, those generated with the oldest weights first."""

from tailrace.transfer.queue.policies.base import RowMeta
from tailrace.transfer.queue.policies.first_in import RowPolicy

_UNKNOWN = -1
"""Sorts before every version: those start at 0."""


class OldestVersionFirst(RowPolicy):
    """Hands out up to `max_rows` ready rows as soon as one is ready: smallest `version` first, then smallest `order`.

    The policy suits an asynchronous run with bounded staleness (AsyncFlow). A row grows staler while it waits. A long
    response, begun under old weights, becomes ready late although it can wait least.

    A row without a version, which has an empty response, comes before all others. Its age is not known, so it counts as
    the oldest and never starves.
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
