"""A worker that has nothing but the tasks of its pool, such as reward and advantage."""

from tailrace.cluster.base import WorkerContext
from tailrace.run.workers.base import RunWorker


def make(settings: bytes, context: WorkerContext) -> RunWorker:
    """For `WorkerSpec.factory`."""
    return RunWorker(settings, context)
