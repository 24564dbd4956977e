"""The policies by which the tasks of a run choose rows: the algorithm's own, or those of `queue.policies`.

A policy of the recipe is refused where its task could not work, or would work on other rows than it should:

    work                        policies that fit
    Train                       token_budget, in windows that make up a training step
    Compute of a step           the same without tokens: a claim is a step
    Compute of a group          whole_groups
    a grader that sees groups   whole_groups
    Serve                       any: it claims by itself
    others                      first_in, whole_groups; oldest_version where the task reads weight_versions
"""

from collections.abc import Collection, Mapping

from tailrace.algorithms.base import Algorithm
from tailrace.algorithms.table import Compute, Grade, Serve, TableTask, Train
from tailrace.config.columns import COLUMNS, ColumnKind
from tailrace.config.queue_policies import (
    BalancedConfig,
    OldestVersionConfig,
    PolicyConfig,
    TokenBudgetConfig,
    WholeGroupsConfig,
)
from tailrace.config.run import RunConfig
from tailrace.config.transfer import RemoteQueueConfig, controllers_of
from tailrace.errors import ConfigError, did_you_mean

_ARRAYS = (ColumnKind.INTS, ColumnKind.FLOATS)


def run_policies(algorithm: Algorithm, config: RunConfig) -> dict[str, PolicyConfig]:
    """The policy of each of the algorithm's tasks, by name.

    Raises:
        ConfigError: the recipe names a task that the algorithm lacks, or a policy that does not fit its task.
    """
    given = {} if isinstance(config.queue, RemoteQueueConfig) else config.queue.policies
    tasks = {task.name: task for task in algorithm.tasks}
    for name in given:
        if name not in tasks:
            raise ConfigError(
                f"queue.policies.{name}: the algorithm has no such task; it has {', '.join(tasks)}"
                f"{did_you_mean(name, tasks)}"
            )
    columns = {**COLUMNS, **algorithm.columns}
    for name, policy in given.items():
        if why := unfit(tasks[name], policy, config, columns):
            raise ConfigError(f"queue.policies.{name}.type={policy.type}: {why}")
    return {name: given.get(name) or task.claims(config) for name, task in tasks.items()}


def unfit(task: TableTask, policy: PolicyConfig, config: RunConfig, columns: Mapping[str, ColumnKind]) -> str | None:
    """The reason why a policy does not fit a task, with the fix; None where it fits. `columns`: those of the table."""
    if why := _unread(policy, task.reads, columns):
        return why
    match task.work:
        case Serve():  # it alone knows how it claims
            return None
        case Train():
            return _unfit_for_steps(policy, config) or _unfit_for_training(policy, config)
        case Compute(of="step"):
            return _unfit_for_steps(policy, config) or _unfit_for_one_claim(policy)
    if isinstance(policy, BalancedConfig):
        return "it splits batches among ranks, and the task claims for none; choose another type"
    if isinstance(policy, TokenBudgetConfig):
        return "it gathers rows until a claim is full, so the last rows of a step would wait; choose whole_groups"
    if _sees_groups(task, config) and not isinstance(policy, WholeGroupsConfig):
        return "it hands out single rows, and the task works on whole groups; choose whole_groups"
    return None


def _unread(policy: PolicyConfig, reads: Collection[str], columns: Mapping[str, ColumnKind]) -> str | None:
    """The reason where a policy looks at a column that the task does not read, or counts one that has no elements."""
    counted: tuple[str, ...]
    match policy:
        case TokenBudgetConfig(tokens=int()):
            counted = (policy.prompt_column, policy.response_column)
        case OldestVersionConfig():
            counted = ("weight_versions",)
        case _:
            return None
    for column in counted:
        if column not in reads:
            return f"it looks at {column}, which the task does not read; choose another type"
        if columns[column] not in _ARRAYS:
            return f"it counts the elements of {column}, which holds {columns[column]}; name columns of arrays"
    return None


def _unfit_for_steps(policy: PolicyConfig, config: RunConfig) -> str | None:
    """The reason where claims of a policy would not add up to training steps, each with its own rows."""
    rows = config.trainer.train_batch_size
    if not isinstance(policy, TokenBudgetConfig):
        return f"a training step could get rows of another one; choose token_budget with window={rows}"
    if policy.window is None or rows % policy.window:
        given = "none" if policy.window is None else policy.window
        return (
            f"window is {given}, which does not divide trainer.train_batch_size={rows}, so that a training step could "
            f"get rows of another one; give window={rows}, or 1 for the run's order"
        )
    return None


def _unfit_for_training(policy: PolicyConfig, config: RunConfig) -> str | None:
    assert isinstance(policy, TokenBudgetConfig), "no other policy fits steps"
    if policy.tokens is not None and not config.pipeline.streaming:
        return "a claim is a whole step with pipeline.streaming=false; leave tokens out, or set pipeline.streaming=true"
    controllers = controllers_of(config.queue)
    if policy.window == 1 and policy.tokens is not None and controllers > 1:
        return (
            f"window is 1, for micro-batches in the run's order, which queue.controllers={controllers} do not keep; "
            f"give window={config.trainer.train_batch_size}, or queue.controllers=1"
        )
    if policy.window != 1 and config.pipeline.in_order:
        return f"window is {policy.window}, and pipeline.in_order=true needs 1; change one of them"
    return None


def _unfit_for_one_claim(policy: PolicyConfig) -> str | None:
    if isinstance(policy, TokenBudgetConfig) and policy.tokens is not None:
        return "a budget would cut the steps, which the task computes as a whole; leave tokens out"
    return None


def _sees_groups(task: TableTask, config: RunConfig) -> bool:
    match task.work:
        case Compute():
            return True
        case Grade(reward=name):
            grading = config.rewards.each.get(name)  # a replay grades without one
            return grading is not None and grading.sees_groups
        case _:
            return False
