"""The worker with nothing but the tasks of its pool, such as reward and advantage."""

from tailrace.cluster.base import WorkerContext
from tailrace.run.workers.base import RunWorker


def make(settings: bytes, context: WorkerContext) -> RunWorker:
    """Make the worker; the pool's `WorkerSpec.factory` names this function."""
    return RunWorker(settings, context)
