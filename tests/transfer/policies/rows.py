"""Rows for policies without a control plane."""

from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.policies.base import Policy, RowMeta


def rows_of(
    group_id: int, *lengths: int, prompt: int = 2, order: int | None = None, version: int | None = None
) -> list[RowMeta]:
    """A group with responses of these lengths. The first row's `order` is 100 times the group_id by default."""
    start = group_id * 100 if order is None else order
    return [
        RowMeta(
            id=RowId(group_id * 100 + i, 0),
            group_id=group_id,
            order=start + i,
            lengths={"prompt_ids": prompt, "response_ids": length},
            version=version,
        )
        for i, length in enumerate(lengths)
    ]


def groups_of(rows: list[RowMeta]) -> list[int]:
    """The group_ids of `rows`, each once."""
    return list(dict.fromkeys(row.group_id for row in rows))


def orders_of(rows: list[RowMeta]) -> list[int]:
    """The `order` of each row."""
    return [row.order for row in rows]


def fill(policy: Policy, *groups: list[RowMeta]) -> None:
    """Add all groups, then make their rows ready."""
    for rows in groups:
        policy.added(rows)
    for rows in groups:
        for row in rows:
            policy.ready(row)
