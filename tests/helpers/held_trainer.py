"""A trainer worker that stands still once in a run, at a moment of its last step, to be killed there."""

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

from tailrace.cluster.base import WorkerContext
from tailrace.events import Event
from tailrace.run.workers.trainer import TrainerWorker
from tailrace.transfer.queue.base import Claim, RowId
from tailrace.types import Value, WeightVersion


async def _stand_still(worker: "_Held") -> None:
    """Tell the driver with an event, then stand still. Do nothing the second time."""
    was_held = Path(worker.config.output_dir) / "held"
    if worker.trained == worker.config.trainer.steps and not was_held.exists():
        was_held.touch()
        worker.context.emit(Event(task=worker.held_at, actor="trainer", start=0.0, end=0.0))
        await worker.stall()


class _Held(TrainerWorker):
    """A trainer worker that knows its last published version."""

    trained = 0
    held_at = "held"
    """The event that says that it stands still."""

    async def stall(self) -> None:
        """Stand still."""
        await asyncio.Event().wait()

    async def publish(self, version: WeightVersion) -> None:
        """See `Publisher`."""
        await super().publish(version)
        self.trained = version


class HeldBeforeEvent(_Held):
    """A worker that stands still before the step's event. The rows are acked, and the engines have the new weights."""

    async def settle(self, version: WeightVersion) -> None:
        """See `Publisher`."""
        await super().settle(version)
        await _stand_still(self)


class HeldInExport(_Held):
    """A worker whose device computes for ever when the model is to be written. It is not killed."""

    held_at = "export begins"

    async def stall(self) -> None:
        """See `_Held`."""
        await asyncio.get_running_loop().run_in_executor(self.executor, threading.Event().wait)

    async def export(self, directory: str) -> None:
        """See `Learner`."""
        await _stand_still(self)
        await super().export(directory)


class HeldBeforeAck(_Held):
    """A worker that stands still before it acks the step's rows. The engines have the new weights."""

    async def start(self) -> None:
        """See `TrainerWorker`."""
        ack = self.queue.ack

        async def held_ack(claim: Claim, outputs: Mapping[RowId, Mapping[str, Value]]) -> None:
            await _stand_still(self)
            await ack(claim, outputs)

        patch.object(self.queue, "ack", held_ack).start()
        await super().start()


def before_event(settings: bytes, context: WorkerContext) -> TrainerWorker:
    """A factory for `WorkerSpec.factory`."""
    return HeldBeforeEvent(settings, context)


def in_export(settings: bytes, context: WorkerContext) -> TrainerWorker:
    """A factory for `WorkerSpec.factory`."""
    return HeldInExport(settings, context)


def before_ack(settings: bytes, context: WorkerContext) -> TrainerWorker:
    """A factory for `WorkerSpec.factory`."""
    return HeldBeforeAck(settings, context)
