"""The transfer queue of a run: the algorithm's table with a policy for each task, and where the queue is."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from tailrace.algorithms.base import Algorithm
from tailrace.config.queue_table import (
    FirstInConfig,
    PolicyConfig,
    TableConfig,
    TaskConfig,
    TokenBudgetConfig,
    WholeGroupsConfig,
)
from tailrace.config.run import RunConfig
from tailrace.config.transfer import LocalQueueConfig, QueueConfig, RemoteQueueConfig, ServiceQueueConfig
from tailrace.errors import ConfigError
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.base import TransferQueue
from tailrace.transfer.queue.client.remote import RemoteQueue
from tailrace.transfer.queue.local import LocalQueue
from tailrace.transfer.queue.look import greet
from tailrace.transfer.queue.policies.factory import make_tasks
from tailrace.transfer.queue.processes import QueueProcesses
from tailrace.types import TaskSpec

_GREETING_LIMIT_S = 10.0
"""For a queue that is said to run already."""


def run_table(config: RunConfig, algorithm: Algorithm) -> TableConfig:
    """The table that the tasks of a run work through."""
    streaming = config.pipeline.streaming
    groups = WholeGroupsConfig(max_groups=config.groups_per_step)
    policies: dict[str, PolicyConfig] = {
        "rollout": groups,
        "reward": FirstInConfig(max_rows=1),
        "reference": groups,
        "advantage": groups,
        "actor": TokenBudgetConfig(
            tokens=config.trainer.micro_batch_tokens if streaming else None,
            in_order=config.pipeline.in_order or not streaming,
        ),
    }
    return TableConfig(
        tasks=tuple(
            TaskConfig(name=spec.name, reads=spec.reads, writes=spec.writes, policy=policies[spec.name])
            for spec in algorithm.tasks
        )
    )


async def open_queue(config: QueueConfig, table: TableConfig, directory: Path, stack: AsyncExitStack) -> TransferQueue:
    """The queue of `config.type`; `stack` closes it. `directory`: for the files of one in processes of its own.

    Raises:
        UserError: the directory cannot be used; a queue that runs already is not there, or has another table.
        QueueError: a process of the queue cannot serve.
    """
    match config:
        case LocalQueueConfig():
            queue: TransferQueue = LocalQueue(make_tasks(table), config, columns=table.columns)
            stack.push_async_callback(queue.close)
            return queue
        case ServiceQueueConfig():
            processes = await stack.enter_async_context(QueueProcesses(config, table, directory))
            remote = await stack.enter_async_context(
                RemoteQueue(processes.address, name="run", timeout_s=config.timeout_s, limit_s=config.client_limit_s)
            )
            loop = asyncio.get_running_loop()
            processes.on_given_up(lambda: loop.call_soon_threadsafe(remote.hang_up))
            return remote
        case RemoteQueueConfig():
            return await _open_remote(config, table, stack)


async def _open_remote(config: RemoteQueueConfig, table: TableConfig, stack: AsyncExitStack) -> TransferQueue:
    address = QueueAddress.read(Path(config.connection))
    welcome = await asyncio.to_thread(greet, address, name="run", limit_s=_GREETING_LIMIT_S)
    served = {task.name: task for task in welcome.tasks}
    needed = {task.spec.name: task.spec for task in make_tasks(table)}
    if served != needed:
        name = next(name for name in (*needed, *served) if served.get(name) != needed.get(name))
        raise ConfigError(
            f"the queue of {config.connection} has another table than this run: its task {name!r} is "
            f"{_described(served.get(name))}, the run's {_described(needed.get(name))}; "
            f"serve this run's recipe with `tailrace queue serve`"
        )
    if differing := sorted(name for name, kind in table.columns.items() if welcome.columns.get(name) != kind):
        raise ConfigError(
            f"the queue of {config.connection} has another table than this run: its column {differing[0]!r} holds "
            f"{welcome.columns.get(differing[0], 'nothing')}, the run's {table.columns[differing[0]]}; "
            f"serve this run's recipe with `tailrace queue serve`"
        )
    return await stack.enter_async_context(
        RemoteQueue(
            address,
            name="run",
            timeout_s=config.timeout_s,
            shared_memory=config.shared_memory,
            limit_s=config.client_limit_s,
        )
    )


def _described(spec: TaskSpec | None) -> str:
    return "missing" if spec is None else f"{list(spec.reads)} -> {list(spec.writes)}"
