"""The context of tasks under test."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path

from tailrace.activity import Activity, TimedExecutor
from tailrace.config.run import RunConfig
from tailrace.events import EventLog
from tailrace.tasks.context import TaskContext
from tailrace.tasks.memory import MemoryUse
from tailrace.transfer.queue.base import TransferQueue
from tests.helpers.runs import small_run


def make_context(
    queue: TransferQueue, log: EventLog, *, config: RunConfig | None = None, actor: str = "reward"
) -> TaskContext:
    """The context of a pool without a device. `config`: by default a run of 8 samples a step, in groups of 4."""
    return TaskContext(
        config=config or small_run(Path("run"), Path("model"), Path("prompts.jsonl")),
        model_dir=Path("model"),
        queue=queue,
        log=log,
        activity=Activity(log, actor),
        memory=MemoryUse(log, actor, "cpu"),
        executor=TimedExecutor(ThreadPoolExecutor(max_workers=1)),
        stack=AsyncExitStack(),
    )
