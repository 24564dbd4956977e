"""The rows of these tests. Each row's cells follow from its number, and its response from its prompt."""

import numpy as np

from tailrace.config.queue_policies import WholeGroupsConfig
from tailrace.config.queue_table import TableConfig, TaskConfig
from tailrace.transfer.queue.base import NewRow
from tailrace.types import IntArray

GROUP_SIZE = 4
TABLE = TableConfig(
    tasks=(
        TaskConfig(name="work", reads=("prompt_ids",), writes=("response_ids",)),
        TaskConfig(name="audit", reads=("prompt_ids", "response_ids"), policy=WholeGroupsConfig()),
    )
)


def prompt(order: int) -> IntArray:
    """The prompt of a row: of four groups, one goes through shared memory, one in frames, two along with Admit."""
    tokens = (4096, 512, 8, 8)[order // GROUP_SIZE % 4]
    return np.arange(tokens, dtype=np.int64) + order


def response(prompt_ids: IntArray) -> IntArray:
    """The response that `work` writes."""
    return 3 * prompt_ids[::-1] + 1


def group(group_id: int) -> list[NewRow]:
    """The rows of a group."""
    orders = range(group_id * GROUP_SIZE, (group_id + 1) * GROUP_SIZE)
    return [
        NewRow(group_id=group_id, group_size=GROUP_SIZE, order=order, cells={"prompt_ids": prompt(order)})
        for order in orders
    ]
