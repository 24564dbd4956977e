"""Makes the tasks of a table from its configuration, each with the policy that it names."""

from functools import partial

from tailrace.config.queue_policies import (
    BalancedConfig,
    FirstInConfig,
    OldestVersionConfig,
    PolicyConfig,
    TokenBudgetConfig,
    WholeGroupsConfig,
)
from tailrace.config.queue_table import TableConfig
from tailrace.errors import QueueError
from tailrace.planning.balance import partition
from tailrace.transfer.queue.policies.balanced import BalancedByLength
from tailrace.transfer.queue.policies.base import Policy
from tailrace.transfer.queue.policies.first_in import FirstIn
from tailrace.transfer.queue.policies.groups import WholeGroups
from tailrace.transfer.queue.policies.oldest_version import OldestVersionFirst
from tailrace.transfer.queue.policies.token_budget import TokenBudget
from tailrace.transfer.queue.rows.table import QueueTask
from tailrace.types import TaskSpec


def make_tasks(table: TableConfig, *, controllers: int = 1) -> list[QueueTask]:
    """Make the tasks of `table`, each with a new policy. `check_table` checks whether rows can pass through them.

    `controllers`: those of the queue; the tasks are for one of them.

    Raises:
        QueueError: see `make_policy`.
    """
    return [
        QueueTask(
            TaskSpec(name=task.name, reads=task.reads, writes=task.writes),
            make_policy(task.policy, controllers=controllers),
        )
        for task in table.tasks
    ]


def make_policy(config: PolicyConfig, *, controllers: int = 1) -> Policy:
    """Make the policy of `config.type`, for one of `controllers`.

    Raises:
        QueueError: a batch has fewer rows than ranks, or several controllers would have to split batches or to keep the
            order of the run.
    """
    match config:
        case FirstInConfig():
            return FirstIn(config.max_rows)
        case OldestVersionConfig():
            return OldestVersionFirst(config.max_rows)
        case WholeGroupsConfig():
            return WholeGroups(config.max_groups)
        case TokenBudgetConfig():
            if controllers > 1 and config.window == 1:
                raise QueueError(
                    f"policy 'token_budget' with window=1 hands out groups in the order of all puts (in a run: "
                    f"pipeline.in_order), and each of the {controllers} controllers knows only its own groups; give "
                    f"queue.controllers=1, or the rows of a training step as window (pipeline.in_order=false)"
                )
            return TokenBudget(
                config.tokens,
                window=config.window,
                prompt_column=config.prompt_column,
                response_column=config.response_column,
                ends_with_window=controllers > 1,
            )
        case BalancedConfig():
            if controllers > 1:
                raise QueueError(
                    f"policy 'balanced' splits batches of rows that one controller has, and queue.controllers is "
                    f"{controllers}; give 1, or another policy"
                )
            return BalancedByLength(
                config.ranks,
                config.rows,
                partition=partial(partition, equal_count=True),
                cost_columns=config.cost_columns,
            )
