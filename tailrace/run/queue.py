"""The transfer queue of a run: the algorithm's table with a policy for each task, and the choice of a queue."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from tailrace.algorithms.factory import make_run_algorithm
from tailrace.algorithms.policies import run_policies
from tailrace.config.columns import COLUMNS
from tailrace.config.queue_policies import PolicyConfig, TokenBudgetConfig
from tailrace.config.queue_table import TableConfig, TaskConfig
from tailrace.config.run import RunConfig
from tailrace.config.transfer import (
    LocalQueueConfig,
    QueueConfig,
    RemoteQueueConfig,
    ServiceQueueConfig,
    controllers_of,
)
from tailrace.errors import ConfigError, GroupExists, PeerLost, QueueError, TailraceError, UserError
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.base import TransferQueue
from tailrace.transfer.queue.client.look import read_stats, read_table
from tailrace.transfer.queue.client.remote import RemoteQueue
from tailrace.transfer.queue.local.queue import LocalQueue
from tailrace.transfer.queue.messages import Table
from tailrace.transfer.queue.processes.preflight import check_service
from tailrace.transfer.queue.processes.several import queue_processes
from tailrace.transfer.queue.rows.table import check_table
from tailrace.transfer.queue.table_factory import make_tasks
from tailrace.types import TaskSpec

_GREETING_LIMIT_S = 10.0
"""Seconds for the first answer of a queue that should be running already."""


def run_table(config: RunConfig) -> TableConfig:
    """The table that the tasks of a run work through.

    Raises:
        UserError: the algorithm cannot be made, one of its tasks uses a column that does not exist, or
            `queue.policies` does not fit it.
    """
    algorithm = make_run_algorithm(config)
    policies = run_policies(algorithm, config)
    if controllers_of(config.queue) > 1:
        policies = {name: _by_steps(policy, config.trainer.train_batch_size) for name, policy in policies.items()}
    return TableConfig(
        tasks=tuple(
            TaskConfig(name=task.name, reads=task.reads, writes=task.writes, policy=policies[task.name])
            for task in algorithm.tasks
        ),
        columns={**COLUMNS, **algorithm.columns},
    )


def _by_steps(policy: PolicyConfig, step_rows: int) -> PolicyConfig:
    """The policy of a task at one of several controllers.

    Where a claim is a whole step, its client puts the step in order: then a part of it need not be handed out group by
    group. `step_rows`: the rows of a training step.
    """
    if isinstance(policy, TokenBudgetConfig) and policy.tokens is None and policy.window == 1:
        return policy.model_copy(update={"window": step_rows})
    return policy


def check_queue(config: QueueConfig, table: TableConfig) -> int:
    """Check that a run can have this queue: that this machine can serve it, or that the running one fits.

    Returns:
        The number of its controllers.

    Raises:
        UserError: no row could pass the table; the queue cannot be served here; or a running one is missing, does not
            answer, has another table, or has served a run.
    """
    match config:
        case LocalQueueConfig():
            _check_policies(table, 1)
            return 1
        case ServiceQueueConfig():
            _check_policies(table, config.controllers)
            check_service(config)
            return config.controllers
        case RemoteQueueConfig():
            return _check_running(config, table)


def _check_policies(table: TableConfig, controllers: int) -> None:
    try:
        tasks = make_tasks(table, controllers=controllers)
    except QueueError as error:
        raise UserError(f"queue: {error}") from None
    try:
        check_table(tasks, table.columns)
    except QueueError as error:
        raise UserError(f"algorithm: {error}") from None


def _check_running(config: RemoteQueueConfig, table: TableConfig) -> int:
    address = QueueAddress.read(config.path)
    _check_policies(table, len(address.each))
    try:
        served = read_table(address, name="run", limit_s=_GREETING_LIMIT_S)
        stats = read_stats(address, name="run", limit_s=_GREETING_LIMIT_S)
    except PeerLost:
        raise UserError(
            f"the queue of {config.connection} has not answered within {_GREETING_LIMIT_S:g} s: "
            f"is `tailrace queue serve` running?"
        ) from None
    _check_table(config.connection, served, table)
    if stats.used or stats.closed:
        raise ConfigError(
            f"the queue of {config.connection} {'was closed' if stats.closed else 'has held rows'}, and a queue is for "
            f"one run (or one --resume); serve another with `tailrace queue serve` and a new --directory, and give its "
            f"queue.connection"
        )
    return len(address.each)


class ClientOptions(TypedDict):
    """The options of a `RemoteQueue` or a `SyncQueue`."""

    timeout_s: float
    limit_s: float
    shared_memory: bool


def client_options(config: QueueConfig) -> ClientOptions:
    """The client options of every process of a run. `config`: of a queue with its own processes."""
    assert config.type != "local"
    shared_memory = config.shared_memory if isinstance(config, RemoteQueueConfig) else True
    return ClientOptions(timeout_s=config.timeout_s, limit_s=config.client_limit_s, shared_memory=shared_memory)


@dataclass(frozen=True, slots=True)
class OpenQueue:
    """A queue as this process uses it."""

    queue: TransferQueue
    address: QueueAddress | None
    """The address for other processes; None for a queue inside this process."""


async def open_queue(config: QueueConfig, table: TableConfig, directory: Path, stack: AsyncExitStack) -> OpenQueue:
    """Open the queue of `config.type`, which was checked; `stack` closes it.

    `directory`: for the files of a queue with its own processes.

    Raises:
        UserError: the directory cannot be used.
        QueueError: a process of the queue cannot serve.
    """
    match config:
        case LocalQueueConfig():
            queue = LocalQueue(make_tasks(table), config, columns=table.columns)
            stack.push_async_callback(queue.close)
            return OpenQueue(queue, None)
        case ServiceQueueConfig():
            processes = queue_processes(config, table, directory)
            await stack.enter_async_context(processes)
            remote = await stack.enter_async_context(
                RemoteQueue(processes.address, name="run", **client_options(config))
            )
            loop = asyncio.get_running_loop()
            processes.on_given_up(lambda: loop.call_soon_threadsafe(remote.hang_up))
            return OpenQueue(remote, processes.address)
        case RemoteQueueConfig():
            address = QueueAddress.read(config.path)
            remote = await stack.enter_async_context(RemoteQueue(address, name="run", **client_options(config)))
            return OpenQueue(remote, address)


def explained(error: QueueError, connection: str, run: Path, checkpoint: Path | None) -> TailraceError | None:
    """The error with advice for a run that its served queue, `connection`, has ended; None where `error` is enough.

    `run`: the run's configuration. `checkpoint`: its last. None can be saved now, since it would hold the queue, too.
    """
    if isinstance(error, GroupExists):
        return UserError(
            f"another run uses the queue of {connection}: {error}; "
            f"serve one for each run, each in a --directory of its own"
        )
    if isinstance(error, PeerLost):
        how = (
            f"go on from {checkpoint}: tailrace train {run} --resume"
            if checkpoint
            else "begin again, without a checkpoint:"
        )
        return PeerLost(
            f"the queue of {connection} does not answer any more: {error}; if it has ended, serve another with "
            f"`tailrace queue serve` and a new --directory, and {how} queue.connection=DIRECTORY/connection.json"
        )
    return None


def _check_table(connection: str, queue: Table, table: TableConfig) -> None:
    served = {task.name: task for task in queue.tasks}
    needed = {task.spec.name: task.spec for task in make_tasks(table)}
    if served != needed:
        name = next(name for name in (*needed, *served) if served.get(name) != needed.get(name))
        raise ConfigError(
            f"the queue of {connection} has another table than this run: its task {name!r} is "
            f"{_described(served.get(name))}, the run's {_described(needed.get(name))}; "
            f"serve this run's recipe with `tailrace queue serve`"
        )
    if differing := sorted(name for name, kind in table.columns.items() if queue.columns.get(name) != kind):
        raise ConfigError(
            f"the queue of {connection} has another table than this run: its column {differing[0]!r} holds "
            f"{queue.columns.get(differing[0], 'nothing')}, the run's {table.columns[differing[0]]}; "
            f"serve this run's recipe with `tailrace queue serve`"
        )


def _described(spec: TaskSpec | None) -> str:
    return "missing" if spec is None else f"{list(spec.reads)} -> {list(spec.writes)}"
