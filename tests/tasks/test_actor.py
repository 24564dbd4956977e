"""The actor trains on every row of a step once, whenever it is interrupted."""

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tailrace.activity import Activity
from tailrace.algorithms.factory import make_algorithm
from tailrace.config.algorithm import GrpoConfig
from tailrace.config.transfer import LocalQueueConfig
from tailrace.errors import NothingGraded, PeerLost
from tailrace.events import EventLog
from tailrace.tasks.actor import Actor, Batch, StepResult, train_sample, uninterrupted
from tailrace.trainer.base import Loss, Trainer, TrainSample, UpdateResult
from tailrace.transfer.queue.base import Claim, NewRow, Row, RowId
from tailrace.transfer.queue.local.queue import LocalQueue
from tailrace.transfer.queue.policies.token_budget import TokenBudget
from tailrace.transfer.queue.rows.table import QueueTask
from tailrace.types import FloatArray, TaskSpec, Value

ACTOR = TaskSpec(name="actor", reads=("prompt_ids", "response_ids", "response_mask", "reward_error", "advantages"))
SAMPLES = 8


class RecordingTrainer(Trainer):
    """A trainer that records its calls. While `let_go` is cleared, `apply` waits for it."""

    def __init__(self) -> None:
        self.pending: list[int] = []
        self.applied: list[list[int]] = []
        self.old_log_probs: list[FloatArray | None] = []
        self.applying = threading.Event()
        self.let_go = threading.Event()
        self.let_go.set()
        self.fails: Exception | None = None
        """The error that `apply` raises."""
        self.fails_after = 0
        """The number of calls of `apply` that succeed before."""

    def log_probs(self, samples: Sequence[TrainSample], *, reference: bool = False) -> list[FloatArray]:
        return [np.full(len(sample.response_ids), len(self.applied), np.float32) for sample in samples]

    def accumulate(self, samples: Sequence[TrainSample], loss: Loss) -> None:
        self.pending += [int(sample.response_ids[0]) for sample in samples]
        self.old_log_probs += [sample.old_log_probs for sample in samples]

    def apply(self) -> UpdateResult:
        self.applying.set()
        assert self.let_go.wait(timeout=10)
        if self.fails is not None and len(self.applied) >= self.fails_after:
            raise self.fails
        self.applied.append(self.pending)
        self.pending = []
        return UpdateResult(applied=True, loss=0.0, grad_norm=0.0, lr=0.0, metrics={})

    def discard(self) -> None:
        self.pending = []

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())

    def save(self, directory: Path) -> None:
        raise NotImplementedError

    def load(self, directory: Path) -> None:
        raise NotImplementedError

    def export(self, directory: Path, *, dtype: torch.dtype | None = None) -> None:
        raise NotImplementedError

    def evidence(self) -> dict[str, Any]:
        return {}


def rows(group: int, error: str = "") -> list[NewRow]:
    """A group of four one-token samples. The token is the order; the grading failed with `error`, if any."""
    return [
        NewRow(
            group_id=group,
            group_size=4,
            order=order,
            cells={
                "prompt_ids": np.array([1], np.int64),
                "response_ids": np.array([order], np.int64),
                "response_mask": np.ones(1, np.int64),
                "reward_error": error,
                "advantages": np.ones(1, np.float32),
            },
        )
        for order in range(group * 4, group * 4 + 4)
    ]


class Bench:
    """An actor with a real queue and a recording trainer."""

    def __init__(
        self,
        log: EventLog,
        executor: ThreadPoolExecutor,
        *,
        tokens: int | None,
        mini: int,
        queue: type[LocalQueue] = LocalQueue,
    ) -> None:
        self.trainer = RecordingTrainer()
        self.now = 0.0
        self.queue = queue(
            [QueueTask(ACTOR, TokenBudget(tokens, window=1 if tokens is None else None))],
            LocalQueueConfig(),
            clock=lambda: self.now,
        )
        self.results: list[StepResult] = []
        """The committed steps."""
        self.actor = Actor(
            self.queue,
            self.trainer,
            "actor",
            make_algorithm(GrpoConfig(group_size=4)).policy_task()[1].loss,
            executor,
            log,
            Activity(log, "trainer"),
            batch_size=SAMPLES,
            mini_batch_size=mini,
        )

    async def commit(self, result: StepResult) -> None:
        stats = (await self.queue.stats()).tasks["actor"]
        assert stats.waiting + stats.ready + stats.leased == len(self.actor.unacked)
        self.results.append(result)

    def update(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._update())

    async def _update(self) -> None:
        async with self.actor.batch(0) as batch:
            await uninterrupted(self._apply(batch))

    async def _apply(self, batch: Batch) -> None:
        await self.commit(await self.actor.apply(batch))
        await self.actor.ack(batch)

    async def lose_claims(self) -> None:
        """Let every lease end, so that its rows are ready again."""
        self.now += 3600.0
        await self.queue.nack(Claim(lease_id=0, lease_s=0.0, task="actor", rows=()))


async def test_one_optimizer_step_trains_on_the_whole_batch(log: EventLog, executor: ThreadPoolExecutor) -> None:
    bench = Bench(log, executor, tokens=None, mini=SAMPLES)
    await bench.queue.put(rows(1) + rows(0))
    await bench.update()
    assert bench.trainer.applied == [list(range(SAMPLES))]
    assert [row.order for row in bench.results[-1].rows] == list(range(SAMPLES))
    assert bench.trainer.old_log_probs == [None] * SAMPLES
    assert ((await bench.queue.stats()).rows, len(bench.results)) == (0, 1)


@pytest.mark.parametrize(("tokens", "mini"), [(None, SAMPLES), (5, SAMPLES), (None, 4)])
async def test_a_step_whose_gradings_have_all_failed_changes_no_weight_and_loses_no_row(
    log: EventLog, executor: ThreadPoolExecutor, tokens: int | None, mini: int
) -> None:
    bench = Bench(log, executor, tokens=tokens, mini=mini)
    await bench.queue.put(rows(0, "KeyError: 'a'") + rows(1, "timeout: too long"))
    with pytest.raises(NothingGraded, match=r"all 8 gradings of step 1 have failed, 4 of them with: KeyError: 'a'"):
        await bench.update()
    assert (bench.trainer.applied, bench.trainer.pending, bench.results) == ([], [], [])
    assert (bench.actor.torn_by, (await bench.queue.stats()).tasks["actor"].ready) == (None, SAMPLES)
    assert [row.order for row in bench.actor.ungraded] == list(range(SAMPLES))


async def test_a_step_with_a_grading_that_succeeded_is_trained_on(log: EventLog, executor: ThreadPoolExecutor) -> None:
    bench = Bench(log, executor, tokens=None, mini=SAMPLES)
    await bench.queue.put(rows(0, "KeyError: 'a'") + rows(1))
    await bench.update()
    assert len(bench.results) == 1


async def test_streaming_accumulates_a_group_before_the_next_is_there(
    log: EventLog, executor: ThreadPoolExecutor
) -> None:
    bench = Bench(log, executor, tokens=5, mini=SAMPLES)
    await bench.queue.put(rows(1))
    update = bench.update()
    while not bench.trainer.pending:
        await asyncio.sleep(0)
    assert bench.trainer.pending == [4, 5, 6, 7]
    await bench.queue.put(rows(0))
    await update
    assert bench.trainer.applied == [[4, 5, 6, 7, 0, 1, 2, 3]]


async def test_streaming_does_not_choose_the_mini_batch_of_a_group(log: EventLog, executor: ThreadPoolExecutor) -> None:
    """Mini-batches by arrival would prefer short responses, since their groups are whole first."""
    bench = Bench(log, executor, tokens=5, mini=4)
    await bench.queue.put(rows(1))
    update = bench.update()
    while (await bench.queue.stats()).tasks["actor"].leased < 4:
        await asyncio.sleep(0)
    await bench.queue.put(rows(0))
    await update
    assert bench.trainer.applied == [[0, 1, 2, 3], [4, 5, 6, 7]]


async def test_mini_batches_share_the_log_probs_of_the_start_of_the_step(
    log: EventLog, executor: ThreadPoolExecutor
) -> None:
    bench = Bench(log, executor, tokens=None, mini=4)
    await bench.queue.put(rows(0) + rows(1))
    await bench.update()
    assert bench.trainer.applied == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [float(old[0]) for old in bench.trainer.old_log_probs if old is not None] == [0.0] * SAMPLES
    assert (len(bench.results[0].updates), len(bench.results)) == (2, 1)


async def test_a_cancelled_update_gives_its_rows_back_and_forgets_their_gradient(
    log: EventLog, executor: ThreadPoolExecutor
) -> None:
    bench = Bench(log, executor, tokens=5, mini=SAMPLES)
    await bench.queue.put(rows(0))
    update = bench.update()
    while not bench.trainer.pending:
        await asyncio.sleep(0)
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    stats = (await bench.queue.stats()).tasks["actor"]
    assert (stats.ready, stats.leased, stats.consumed) == (4, 0, 0)
    assert (bench.trainer.pending, bench.trainer.applied, len(bench.results)) == ([], [], 0)


@pytest.mark.parametrize("times", [1, 3])
async def test_a_cancellation_during_the_optimizer_step_comes_after_its_ack(
    log: EventLog, executor: ThreadPoolExecutor, times: int
) -> None:
    bench = Bench(log, executor, tokens=None, mini=SAMPLES)
    await bench.queue.put(rows(0) + rows(1))
    bench.trainer.let_go.clear()
    update = bench.update()
    while not bench.trainer.applying.is_set():
        await asyncio.sleep(0)
    for _ in range(times):
        update.cancel()
        await asyncio.sleep(0)
    bench.trainer.let_go.set()
    with pytest.raises(asyncio.CancelledError):
        await update
    assert bench.trainer.applied == [list(range(SAMPLES))]
    assert ((await bench.queue.stats()).rows, len(bench.results)) == (0, 1)


@pytest.mark.filterwarnings("ignore:work on a claim")
@pytest.mark.parametrize("mini", [SAMPLES, 4])
async def test_rows_that_come_again_within_an_update_are_in_it_once(
    log: EventLog, executor: ThreadPoolExecutor, mini: int
) -> None:
    bench = Bench(log, executor, tokens=5, mini=mini)
    await bench.queue.put(rows(0))
    update = bench.update()
    while not (stats := await bench.queue.stats()).tasks["actor"].claims or not stats.tasks["actor"].leased:
        await asyncio.sleep(0)
    await bench.lose_claims()
    await bench.queue.put(rows(1))
    await update
    assert [order for applied in bench.trainer.applied for order in applied] == list(range(SAMPLES))
    assert [row.order for row in bench.results[-1].rows] == list(range(SAMPLES))
    assert ((await bench.queue.stats()).rows, bench.actor.unacked, len(bench.results)) == (0, set(), 1)


@pytest.mark.filterwarnings("ignore:work on a claim")
@pytest.mark.parametrize("tokens", [None, 5])
async def test_rows_that_come_again_after_their_update_are_acked_without_another(
    log: EventLog, executor: ThreadPoolExecutor, tokens: int | None
) -> None:
    bench = Bench(log, executor, tokens=tokens, mini=SAMPLES)
    await bench.queue.put(rows(0) + rows(1))
    bench.trainer.let_go.clear()
    update = bench.update()
    while not bench.trainer.applying.is_set():
        await asyncio.sleep(0)
    await bench.lose_claims()
    bench.trainer.let_go.set()
    await update
    assert bench.actor.unacked == set(range(SAMPLES))
    await bench.queue.put(rows(2) + rows(3))
    await bench.update()
    assert bench.trainer.applied == [list(range(SAMPLES)), list(range(SAMPLES, 2 * SAMPLES))]
    assert [row.order for row in bench.results[-1].rows] == list(range(SAMPLES, 2 * SAMPLES))
    assert ((await bench.queue.stats()).rows, bench.actor.unacked, len(bench.results)) == (0, set(), 2)


class AcksFail(LocalQueue):
    """A queue that loses all acks but the first."""

    acks = 0

    async def ack(self, claim: Claim, outputs: Mapping[RowId, Mapping[str, Value]]) -> None:
        self.acks += 1
        if self.acks == 1:
            await super().ack(claim, outputs)
            return
        raise PeerLost("no answer")


async def test_rows_whose_acks_fail_are_in_the_weights_and_their_step_counts(
    log: EventLog, executor: ThreadPoolExecutor
) -> None:
    bench = Bench(log, executor, tokens=5, mini=SAMPLES, queue=AcksFail)
    await bench.queue.put(rows(0) + rows(1))
    with pytest.raises(PeerLost):
        await bench.update()
    assert (bench.trainer.applied, len(bench.results)) == ([list(range(SAMPLES))], 1)
    assert ((await bench.queue.stats()).tasks["actor"].ready, bench.actor.unacked) == (4, {4, 5, 6, 7})


class NacksTogether(LocalQueue):
    """A queue that is lost once two nacks are under way."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.both = asyncio.Barrier(2)

    async def nack(self, claim: Claim, rows: Sequence[RowId] | None = None) -> None:
        async with asyncio.timeout(5):
            await self.both.wait()
        raise PeerLost("no answer")


async def test_claims_are_given_back_at_once_and_a_queue_that_is_lost_does_not_hide_the_error(
    log: EventLog, executor: ThreadPoolExecutor
) -> None:
    bench = Bench(log, executor, tokens=5, mini=SAMPLES, queue=NacksTogether)
    bench.trainer.fails = ZeroDivisionError()
    await bench.queue.put(rows(0) + rows(1))
    with pytest.raises(ZeroDivisionError):
        await bench.update()


async def test_rows_that_came_again_are_not_consumed_by_an_update_that_is_cancelled(
    log: EventLog, executor: ThreadPoolExecutor
) -> None:
    bench = Bench(log, executor, tokens=5, mini=SAMPLES)
    await bench.queue.put(rows(0))
    update = bench.update()
    while not bench.trainer.pending:
        await asyncio.sleep(0)
    await bench.lose_claims()
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    assert (await bench.queue.stats()).tasks["actor"].ready == 4
    assert (bench.trainer.applied, bench.actor.unacked) == ([], set())


@pytest.mark.parametrize(("reward", "mask"), [(float("nan"), [0, 0]), (0.0, [1, 1])])
def test_a_sample_whose_grading_failed_is_masked(reward: float, mask: list[int]) -> None:
    cells: dict[str, Value] = {"prompt_ids": np.array([1]), "response_ids": np.array([1, 2]), "reward": reward}
    sample = train_sample(Row(id=RowId(0, 0), group_id=0, order=0, cells=cells))
    assert sample.response_mask.tolist() == mask
