"""A configured table becomes tasks with the policies that it names."""

from typing import Any

import pytest

from tailrace.config.columns import COLUMNS
from tailrace.config.load import parse_as
from tailrace.config.queue_policies import TokenBudgetConfig
from tailrace.config.queue_table import TableConfig
from tailrace.errors import ConfigError, QueueError
from tailrace.transfer.queue.policies.balanced import BalancedByLength
from tailrace.transfer.queue.policies.base import Policy
from tailrace.transfer.queue.policies.first_in import FirstIn
from tailrace.transfer.queue.policies.groups import WholeGroups
from tailrace.transfer.queue.policies.oldest_version import OldestVersionFirst
from tailrace.transfer.queue.policies.token_budget import TokenBudget
from tailrace.transfer.queue.rows.table import check_table
from tailrace.transfer.queue.table_factory import make_policy, make_tasks
from tailrace.types import TaskSpec
from tests.transfer.policies.rows import fill, rows_of


def table(*policies: dict[str, Any]) -> TableConfig:
    """A table of tasks t0, t1, … that read the lengths of prompt and response."""
    reads = ["prompt_ids", "response_ids", "weight_versions"]
    tasks = [{"name": f"t{k}", "reads": reads, "policy": policy} for k, policy in enumerate(policies)]
    return parse_as(TableConfig, {"tasks": tasks}, source="test")


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"type": "first_in", "max_rows": 3}, FirstIn),
        ({"type": "oldest_version"}, OldestVersionFirst),
        ({"type": "whole_groups", "max_groups": 2}, WholeGroups),
        ({"type": "token_budget", "tokens": 100, "window": 1}, TokenBudget),
        ({"type": "balanced", "ranks": 2, "rows": 4}, BalancedByLength),
    ],
)
def test_every_policy_can_be_configured(config: dict[str, Any], kind: type[Policy]) -> None:
    [task] = make_tasks(table(config))
    assert type(task.policy) is kind
    assert task.policy.name == config["type"]
    assert task.spec == TaskSpec(name="t0", reads=("prompt_ids", "response_ids", "weight_versions"))
    check_table([task], COLUMNS)


def test_each_task_has_a_policy_of_its_own() -> None:
    config = table({"type": "first_in"}, {"type": "first_in"})
    policies = [task.policy for task in (*make_tasks(config), *make_tasks(config))]
    assert len({id(policy) for policy in policies}) == 4


def test_a_balanced_batch_gives_every_rank_equally_many_rows() -> None:
    [task] = make_tasks(table({"type": "balanced", "ranks": 2, "rows": 4}))
    fill(task.policy, rows_of(0, 9, 1), rows_of(1, 1, 1))
    assert [len(task.policy.take(None, rank)) for rank in (0, 1)] == [2, 2]


def test_fewer_rows_than_ranks_are_refused() -> None:
    with pytest.raises(QueueError, match="at least the number of ranks, 4"):
        make_tasks(table({"type": "balanced", "ranks": 4, "rows": 2}))


def test_a_table_travels_as_json() -> None:
    config = table({"type": "token_budget", "tokens": 7}, {"type": "balanced", "ranks": 2, "rows": 4})
    assert TableConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"type": "fifo"}, r"tasks.0.policy.type is 'fifo'; expected one of 'first_in'"),
        ({"type": "balanced", "ranks": 2}, "tasks.0.policy.rows is required and missing"),
        ({"type": "first_in", "max_row": 2}, r"unknown key tasks.0.policy.max_row; did you mean .*max_rows"),
    ],
)
def test_a_mistake_in_a_policy_is_one_clear_line(policy: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        table(policy)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("tokens", [None, 4096])
def test_several_controllers_keep_no_order_of_groups(tokens: int | None) -> None:
    config = TokenBudgetConfig(tokens=tokens, window=1)
    make_policy(config)
    with pytest.raises(QueueError, match=r"window=1 .* each of the 2 controllers .* give queue\.controllers=1"):
        make_policy(config, controllers=2)
