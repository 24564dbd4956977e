"""A learner does one thing at a time."""

import asyncio
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors import SafetensorError

from tailrace.errors import CheckpointError, NonFiniteError
from tailrace.events import Event, EventLog
from tailrace.run.checkpoint import Checkpointer
from tailrace.run.learner import LocalLearner, LocalModelLearner
from tests.tasks.test_actor import Bench, RecordingTrainer, rows


class NoEngines:
    """A publisher without engines."""

    async def publish(self, version: int) -> None:
        pass

    async def settle(self, version: int) -> None:
        pass


class EnginesThatAreGone(NoEngines):
    """A publisher whose engines never install what they were sent."""

    def __init__(self) -> None:
        self.awaited = asyncio.Event()

    async def settle(self, version: int) -> None:
        self.awaited.set()
        await asyncio.Event().wait()


class Witness(Checkpointer):
    """A checkpointer that keeps the trained steps and the number of optimizer steps of each checkpoint."""

    def __init__(self, trainer: RecordingTrainer) -> None:
        self.saved: list[tuple[int, int]] = []
        self._recording = trainer

    async def save(
        self,
        trained_steps: int,
        next_step: int,
        unacked: Iterable[int],
        staged: Path | None = None,
        kl_coefficients: Sequence[float] = (),
    ) -> None:
        self.saved.append((trained_steps, len(self._recording.applied)))


@pytest.fixture(autouse=True)
def _without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute no step metrics: the rows here have no rewards."""
    monkeypatch.setattr("tailrace.run.learner.step_metrics", lambda *_: {})


async def test_a_checkpoint_asked_for_in_the_middle_of_a_cancelled_step_is_of_its_end(
    log: EventLog, executor: ThreadPoolExecutor
) -> None:
    """This is Ctrl-C during a step that takes longer to end than the driver waits."""
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
    """This is Ctrl-C in the middle of a step; it has ended the engines, too."""
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


class Published(NoEngines):
    """A publisher that keeps the versions."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    async def publish(self, version: int) -> None:
        self.versions.append(version)


async def test_new_weights_are_made_while_they_are_held_and_published_afterwards(
    log: EventLog, events: list[Event], executor: ThreadPoolExecutor
) -> None:
    bench, engines = Bench(log, executor, tokens=None, mini=8), Published()
    learner = LocalLearner(bench.actor, bench.trainer, executor, engines, Witness(bench.trainer), log)
    await bench.queue.put(rows(0) + rows(1))
    await learner.hold()
    train = asyncio.create_task(learner.train(0))
    while not learner.trained_steps:
        await asyncio.sleep(0)
    assert (len(bench.trainer.applied), engines.versions, train.done()) == (1, [], False)
    await learner.release()
    await train
    assert engines.versions == [1]
    assert [event.version for event in events if event.task == "evaluation_wait"] == [1]


async def test_a_step_that_is_cancelled_does_not_wait_for_the_evaluation(
    log: EventLog, executor: ThreadPoolExecutor
) -> None:
    """This is Ctrl-C: nobody will release the weights."""
    bench, engines = Bench(log, executor, tokens=None, mini=8), Published()
    witness = Witness(bench.trainer)
    learner = LocalLearner(bench.actor, bench.trainer, executor, engines, witness, log)
    await bench.queue.put(rows(0) + rows(1))
    await learner.hold()
    train = asyncio.create_task(learner.train(0))
    while not learner.trained_steps:
        await asyncio.sleep(0)
    train.cancel()
    await learner.save(1)
    assert (engines.versions, witness.saved, bench.actor.unacked) == ([1], [(1, 1)], set())
    with pytest.raises(asyncio.CancelledError):
        await train


FULL = MemoryError("no memory")
UNSAVED = "nothing is saved, since step 1 has failed in the middle of its update (no memory)"


@pytest.mark.parametrize(("mini", "failing"), [(8, 0), (4, 0), (4, 1)])
async def test_weights_in_the_middle_of_a_step_are_not_saved(
    log: EventLog, executor: ThreadPoolExecutor, mini: int, failing: int
) -> None:
    """The failed optimizer step, the only one or one of two, may have changed some weights."""
    bench = Bench(log, executor, tokens=None, mini=mini)
    witness = Witness(bench.trainer)
    learner = LocalLearner(bench.actor, bench.trainer, executor, NoEngines(), witness, log)
    await bench.queue.put(rows(0) + rows(1))
    bench.trainer.fails, bench.trainer.fails_after = FULL, failing
    with pytest.raises(MemoryError):
        await learner.train(0)
    with pytest.raises(CheckpointError, match=re.escape(UNSAVED)):
        await learner.save(1)
    assert witness.saved == []


async def test_weights_of_an_optimizer_step_that_could_not_be_told_of_are_not_saved(
    executor: ThreadPoolExecutor,
) -> None:
    """The step's rows went back, and would be trained on twice."""

    def full(event: Event) -> None:
        if event.task == "optimizer":
            raise FULL

    log = EventLog(sinks=(full,))
    bench = Bench(log, executor, tokens=None, mini=8)
    witness = Witness(bench.trainer)
    learner = LocalLearner(bench.actor, bench.trainer, executor, NoEngines(), witness, log)
    await bench.queue.put(rows(0) + rows(1))
    with pytest.raises(MemoryError):
        await learner.train(0)
    assert (len(bench.trainer.applied), (await bench.queue.stats()).tasks["actor"].ready) == (1, 8)
    with pytest.raises(CheckpointError, match=re.escape(UNSAVED)):
        await learner.save(1)
    assert witness.saved == []


@pytest.mark.parametrize("mini", [8, 4])
async def test_a_step_that_was_refused_before_its_first_optimizer_step_leaves_weights_to_save(
    log: EventLog, executor: ThreadPoolExecutor, mini: int
) -> None:
    bench = Bench(log, executor, tokens=None, mini=mini)
    witness = Witness(bench.trainer)
    learner = LocalLearner(bench.actor, bench.trainer, executor, NoEngines(), witness, log)
    await bench.queue.put(rows(0) + rows(1))
    bench.trainer.fails = NonFiniteError("loss is nan")
    with pytest.raises(NonFiniteError):
        await learner.train(0)
    await learner.save(1)
    assert witness.saved == [(0, 0)]


async def test_a_model_that_is_a_step_behind_the_policy_catches_up(
    log: EventLog, events: list[Event], executor: ThreadPoolExecutor
) -> None:
    """An interrupt lets the policy finish its update, and cancels a critic that is still accumulating."""
    bench = Bench(log, executor, tokens=None, mini=8)
    critic = LocalModelLearner(bench.actor, bench.trainer, executor)
    await bench.queue.put([row for group in range(4) for row in rows(group)])
    await critic.train(1)
    assert [event.step for event in events if event.task == "optimizer"] == [0, 1]
    assert (await bench.queue.stats()).tasks["actor"].consumed == 16
    await critic.train(0)
    assert len(bench.trainer.applied) == 2


async def test_a_disk_that_is_full_is_said_of_a_model_too(
    log: EventLog, executor: ThreadPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(log, executor, tokens=None, mini=8)

    def full(directory: Path) -> None:
        raise SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr(bench.trainer, "save", full)
    with pytest.raises(CheckpointError, match=r"critic cannot be written: No space left"):
        await LocalModelLearner(bench.actor, bench.trainer, executor).save(tmp_path / "critic")
