"""A learner does one thing at a time."""

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tailrace.checkpointing import Checkpointer
from tailrace.events import EventLog
from tailrace.learner import LocalLearner
from tests.trainer.test_actor import Bench, RecordingTrainer, rows


class NoEngines:
    """Takes weights for nobody."""

    async def publish(self, version: int) -> None:
        pass

    async def settle(self, version: int) -> None:
        pass


class Witness(Checkpointer):
    """Keeps what a checkpoint would say, and the optimizer steps that would be in it."""

    def __init__(self, trainer: RecordingTrainer) -> None:
        self.saved: list[tuple[int, int]] = []
        self._recording = trainer

    async def save(self, trained_steps: int, next_step: int, unacked: Iterable[int]) -> None:
        self.saved.append((trained_steps, len(self._recording.applied)))


async def test_a_checkpoint_asked_for_in_the_middle_of_a_cancelled_step_is_of_its_end(
    log: EventLog, executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of Ctrl-C, when the step takes longer to end than the driver waits for it."""
    monkeypatch.setattr("tailrace.learner.step_metrics", lambda *_: {})
    bench = Bench(log, executor, tokens=None, mini=4)
    witness = Witness(bench.trainer)
    learner = LocalLearner(bench.actor, bench.trainer, executor, NoEngines(), witness, log)
    await bench.queue.put(rows(0) + rows(1))
    bench.trainer.let_go.clear()
    train = asyncio.create_task(learner.train(0))
    while not bench.trainer.applying.is_set():
        await asyncio.sleep(0)
    train.cancel()
    save = asyncio.create_task(learner.save(1))
    for _ in range(10):
        await asyncio.sleep(0)
    bench.trainer.let_go.set()
    await save
    assert witness.saved == [(1, 2)]
    with pytest.raises(asyncio.CancelledError):
        await train
