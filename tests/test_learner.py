"""A learner does one thing at a time."""

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tailrace.checkpointing import Checkpointer
from tailrace.errors import CheckpointError
from tailrace.events import Event, EventLog
from tailrace.learner import LocalLearner
from tests.trainer.test_actor import Bench, RecordingTrainer, rows


class NoEngines:
    """Takes weights for nobody."""

    async def publish(self, version: int) -> None:
        pass

    async def settle(self, version: int) -> None:
        pass


class EnginesThatAreGone(NoEngines):
    """What they were sent is never installed."""

    def __init__(self) -> None:
        self.awaited = asyncio.Event()

    async def settle(self, version: int) -> None:
        self.awaited.set()
        await asyncio.Event().wait()


class Witness(Checkpointer):
    """Keeps what a checkpoint would say, and the optimizer steps that would be in it."""

    def __init__(self, trainer: RecordingTrainer) -> None:
        self.saved: list[tuple[int, int]] = []
        self._recording = trainer

    async def save(self, trained_steps: int, next_step: int, unacked: Iterable[int]) -> None:
        self.saved.append((trained_steps, len(self._recording.applied)))


@pytest.fixture(autouse=True)
def _without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows here have no rewards."""
    monkeypatch.setattr("tailrace.learner.step_metrics", lambda *_: {})


async def test_a_checkpoint_asked_for_in_the_middle_of_a_cancelled_step_is_of_its_end(
    log: EventLog, executor: ThreadPoolExecutor
) -> None:
    """As of Ctrl-C, when the step takes longer to end than the driver waits for it."""
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


async def test_a_checkpoint_does_not_wait_for_engines_that_will_not_install(
    log: EventLog, events: list[Event], executor: ThreadPoolExecutor
) -> None:
    """As of Ctrl-C, which has ended them, in the middle of a step."""
    bench = Bench(log, executor, tokens=None, mini=4)
    witness, engines = Witness(bench.trainer), EnginesThatAreGone()
    learner = LocalLearner(bench.actor, bench.trainer, executor, engines, witness, log)
    await bench.queue.put(rows(0) + rows(1))
    train = asyncio.create_task(learner.train(0))
    await engines.awaited.wait()
    train.cancel()
    await learner.save(1)
    assert witness.saved == [(1, 2)]
    assert [event.step for event in events if event.task == "step"] == [0]
    assert bench.actor.unacked == set()
    with pytest.raises(asyncio.CancelledError):
        await train


@pytest.mark.parametrize(("failing", "saved"), [(0, [(0, 0)]), (1, [])])
async def test_weights_in_the_middle_of_a_step_are_not_saved(
    log: EventLog, executor: ThreadPoolExecutor, failing: int, saved: list[tuple[int, int]]
) -> None:
    """The optimizer step that fails is the first of two, before which all is as it was, or the second."""
    bench = Bench(log, executor, tokens=None, mini=4)
    witness = Witness(bench.trainer)
    learner = LocalLearner(bench.actor, bench.trainer, executor, NoEngines(), witness, log)
    await bench.queue.put(rows(0) + rows(1))
    bench.trainer.fails, bench.trainer.fails_after = MemoryError("no memory"), failing
    with pytest.raises(MemoryError):
        await learner.train(0)
    if saved:
        await learner.save(1)
    else:
        with pytest.raises(
            CheckpointError, match=r"step 1 has failed between two of its optimizer steps \(no memory\)"
        ):
            await learner.save(1)
    assert witness.saved == saved
