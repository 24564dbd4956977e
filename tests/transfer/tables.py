"""A table of three tasks, its rows, and queues of it."""

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np

from tailrace.config.transfer import LocalQueueConfig
from tailrace.transfer.queue.base import Claim, NewRow, RowId
from tailrace.transfer.queue.local.queue import LocalQueue
from tailrace.transfer.queue.policies.base import Policy
from tailrace.transfer.queue.policies.first_in import FirstIn
from tailrace.transfer.queue.policies.groups import WholeGroups
from tailrace.transfer.queue.policies.token_budget import TokenBudget
from tailrace.transfer.queue.rows.state import RowHeader
from tailrace.transfer.queue.rows.table import QueueTask
from tailrace.types import IntArray, TaskSpec, Value

ROLLOUT = TaskSpec(name="rollout", reads=("prompt_ids",), writes=("response_ids",))
REWARD = TaskSpec(name="reward", reads=("response_ids",), writes=("reward",))
ACTOR = TaskSpec(name="actor", reads=("prompt_ids", "response_ids", "reward"))


def table(
    rollout: Policy | None = None, reward: Policy | None = None, actor: Policy | None = None
) -> tuple[QueueTask, ...]:
    """The table rollout → reward → actor: rows one by one, group by group, and by tokens in order."""
    return (
        QueueTask(ROLLOUT, rollout or FirstIn(1)),
        QueueTask(REWARD, reward or WholeGroups(1)),
        QueueTask(ACTOR, actor or TokenBudget(64, window=1)),
    )


def one_task(policy: Policy) -> tuple[QueueTask, ...]:
    """A table of one task that reads `prompt_ids`."""
    return (QueueTask(TaskSpec(name="only", reads=("prompt_ids",)), policy),)


def queue_of(tasks: Sequence[QueueTask], **config: float) -> LocalQueue:
    """A queue that measures leases by the running loop's clock."""
    return LocalQueue(tasks, LocalQueueConfig.model_validate(config), clock=lambda: asyncio.get_running_loop().time())


def tokens(length: int) -> IntArray:
    """Token ids, [length]."""
    return np.arange(length, dtype=np.int64)


def group(group_id: int, size: int = 1, *, order: int | None = None, prompt: int = 2) -> list[NewRow]:
    """The rows of one group. The first row's `order` is 100 times the group_id by default."""
    start = group_id * 100 if order is None else order
    cells = {"prompt_ids": tokens(prompt)}
    return [NewRow(group_id=group_id, group_size=size, order=start + i, cells=cells) for i in range(size)]


def headers(rows: Sequence[NewRow]) -> list[RowHeader]:
    """The rows without their cells."""
    return list(map(RowHeader.of, rows))


def outputs(claim: Claim, **cells: Value) -> Mapping[RowId, Mapping[str, Value]]:
    """The same output cells for every row of `claim`."""
    return {row.id: cells for row in claim.rows}


def orders(claim: Claim) -> list[int]:
    """The `order` of each row of `claim`."""
    return [row.order for row in claim.rows]
