"""The small tasks write their columns for every row, and the failure of one ends all."""

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from tailrace.algorithms.factory import make_algorithm
from tailrace.algorithms.table import REWARD, Cells, Compute
from tailrace.config.algorithm import GrpoConfig
from tailrace.config.rewards import FunctionReward, RewardsConfig
from tailrace.config.transfer import LocalQueueConfig
from tailrace.errors import ColumnError
from tailrace.events import Event, EventLog
from tailrace.rewards.pool import GraderPool
from tailrace.tasks.base import Outputs, Task
from tailrace.tasks.compute import ComputeTask
from tailrace.tasks.reward import RewardTask
from tailrace.transfer.queue.base import Claim, NewRow, Row, RowId
from tailrace.transfer.queue.local.queue import LocalQueue
from tailrace.transfer.queue.policies.first_in import FirstIn
from tailrace.transfer.queue.policies.groups import WholeGroups
from tailrace.transfer.queue.rows.table import QueueTask
from tailrace.types import FloatArray, TaskSpec, Value
from tests.helpers.contexts import make_context
from tests.helpers.runs import small_run
from tests.tasks.schedules import advantage_task
from tests.transfer.virtual_time import virtual_time

ADVANTAGE = TaskSpec(name="advantage", reads=("reward", "response_mask"), writes=("advantages",))
SINK = TaskSpec(name="sink", reads=("advantages", "reward", "reward_error"))


class Filling(Task):
    """A task that writes `ref_log_probs` by a function."""

    def __init__(
        self, queue: LocalQueue, log: EventLog, cells: Callable[[Claim], Coroutine[Any, Any, list[FloatArray]]]
    ) -> None:
        super().__init__(make_context(queue, log), "reference")
        self._cells = cells

    async def compute(self, claim: Claim, span: Event) -> Outputs:
        cells = await self._cells(claim)
        return {row.id: {"ref_log_probs": cell} for row, cell in zip(claim.rows, cells, strict=True)}


def group(responses: list[str]) -> list[NewRow]:
    return [
        NewRow(
            group_id=0,
            group_size=len(responses),
            order=order,
            cells={
                "prompt": "p",
                "question": "q",
                "answer": None,
                "metadata": {},
                "response": response,
                "response_ids": np.arange(len(response)),
                "finish_reason": "stop",
                "response_mask": np.ones(len(response), np.int64),
            },
        )
        for order, response in enumerate(responses)
    ]


async def run_tasks(log: EventLog, rewards: RewardsConfig, responses: list[str]) -> list[dict[str, Any]]:
    """The cells that the reward and advantage tasks write for one group."""
    queue = LocalQueue(
        [QueueTask(REWARD.spec, FirstIn(2)), QueueTask(ADVANTAGE, WholeGroups(8)), QueueTask(SINK, WholeGroups(8))],
        LocalQueueConfig(),
    )
    config = small_run(Path("run"), Path("model"), Path("prompts.jsonl"))
    context = make_context(queue, log, config=config.model_copy(update={"rewards": rewards}))
    async with GraderPool(rewards.each[""]) as pool, asyncio.TaskGroup() as running:
        running.create_task(RewardTask(context, "reward", pool).run())
        running.create_task(advantage_task(context, make_algorithm(GrpoConfig())).run())
        await queue.put(group(responses))
        claim = await queue.claim("sink")
        await queue.close()
    return [dict(row.cells) for row in sorted(claim.rows, key=lambda row: row.order)]


def grader(name: str, failure_reward: float | None = None) -> RewardsConfig:
    function = FunctionReward(path=f"tests.helpers.graders.{name}")
    return RewardsConfig(grader=function, workers=1, failure_reward=failure_reward)


async def test_rewards_become_group_normalized_advantages_of_each_token(log: EventLog) -> None:
    cells = await run_tasks(log, grader("digit_fraction"), ["12", "a1", "abcd", "9"])
    assert [cell["reward"] for cell in cells] == [1.0, 0.5, 0.0, 1.0]
    rewards = np.array([1.0, 0.5, 0.0, 1.0])
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    for cell, value, length in zip(cells, expected, [2, 2, 4, 1], strict=True):
        np.testing.assert_allclose(cell["advantages"], np.full(length, value), rtol=1e-6)


async def test_a_failed_grading_is_nan_with_its_reason_and_no_advantage(log: EventLog, events: list[Event]) -> None:
    cells = await run_tasks(log, grader("fails_on_even_length"), ["1", "ab", "a"])
    assert math.isnan(cells[1]["reward"])
    assert cells[1]["reward_error"] == "ArithmeticError: even (tests/helpers/graders.py, line 14)"
    assert cells[1]["advantages"].tolist() == [0.0, 0.0]
    assert cells[0]["advantages"][0] == -cells[2]["advantages"][0] > 0
    failures = [e.info["failures"] for e in events if e.task == "reward" and "failures" in e.info]
    assert failures == [{"ArithmeticError": 1}]


async def test_a_stated_failure_reward_takes_the_place_of_nan(log: EventLog) -> None:
    cells = await run_tasks(log, grader("fails_on_even_length", failure_reward=-1.0), ["1", "ab", "a"])
    assert [cell["reward"] for cell in cells] == [1.0, -1.0, 0.0]
    assert cells[1]["reward_error"] == "ArithmeticError: even (tests/helpers/graders.py, line 14)"


async def test_what_comes_again_of_a_step_is_computed_with_the_rest_of_it(log: EventLog) -> None:
    def centred(rows: Sequence[Cells]) -> list[Cells]:
        mean = fmean(row["reward"] for row in rows)
        return [{"advantages": row["reward"] - mean} for row in rows]

    queue = LocalQueue([QueueTask(ADVANTAGE, FirstIn(8))], LocalQueueConfig())
    task = ComputeTask(make_context(queue, log), "advantage", Compute(centred, of="step"))

    async def computed(first_id: int, rewards: Mapping[int, float]) -> list[Value]:
        rows = tuple(
            Row(id=RowId(first_id + place, 0), group_id=place // 4, order=place, cells={"reward": reward})
            for place, reward in rewards.items()
        )
        claim = Claim(lease_id=0, lease_s=9.0, task="advantage", rows=rows)
        outputs = await task.compute(claim, Event(task="advantage", actor="advantage", start=0.0, end=0.0))
        assert outputs.keys() == {row.id for row in rows}
        return [outputs[row.id]["advantages"] for row in rows]

    whole = dict(enumerate([1.0, 0.0, 0.0, 3.0, 4.0, 4.0, 0.0, 4.0]))
    assert await computed(0, whole) == [-1.0, -2.0, -2.0, 1.0, 2.0, 2.0, -2.0, 2.0]
    later = {8 + place: reward for place, reward in whole.items()}
    assert await computed(0, later) == [-1.0, -2.0, -2.0, 1.0, 2.0, 2.0, -2.0, 2.0]
    # the second group of the later step is lost, and its new responses have other rewards
    assert await computed(100, {12: 4.0, 13: 8.0, 14: 4.0, 15: 4.0}) == [1.0, 5.0, 1.0, 1.0]


async def test_an_error_in_a_task_reaches_the_caller_and_gives_its_rows_back(log: EventLog) -> None:
    spec = TaskSpec(name="reference", reads=("response",), writes=("ref_log_probs",))
    queue = LocalQueue([QueueTask(spec, FirstIn(8))], LocalQueueConfig())

    async def wrong_dtype(claim: Claim) -> list[FloatArray]:
        return [np.zeros(1, np.float64) for _ in claim.rows]

    await queue.put([NewRow(group_id=0, group_size=1, order=0, cells={"response": "x"})])
    with pytest.raises(ExceptionGroup) as caught:
        await Filling(queue, log, wrong_dtype).run()
    assert caught.group_contains(ColumnError, match="ref_log_probs")
    assert (await queue.stats()).tasks["reference"].ready == 1


@pytest.mark.filterwarnings("ignore:work on a claim")
async def test_work_on_rows_whose_claim_is_void_is_thrown_away_and_done_again(
    log: EventLog, events: list[Event]
) -> None:
    spec = TaskSpec(name="reference", reads=("response",), writes=("ref_log_probs",))
    now = 0.0
    queue = LocalQueue(
        [QueueTask(spec, FirstIn(1)), QueueTask(TaskSpec(name="sink", reads=("ref_log_probs",)), FirstIn(1))],
        LocalQueueConfig(),
        clock=lambda: now,
    )
    made: list[float] = []

    async def slow_at_first(claim: Claim) -> list[FloatArray]:
        nonlocal now
        now += 0.0 if made else 3600.0
        made.append(now)
        return [np.full(1, len(made), np.float32)]

    async with asyncio.TaskGroup() as running:
        running.create_task(Filling(queue, log, slow_at_first).run())
        await queue.put([NewRow(group_id=0, group_size=1, order=0, cells={"response": "x"})])
        claim = await queue.claim("sink")
        await queue.close()
    assert claim.rows[0].cells["ref_log_probs"] == [2.0]
    assert [event.info for event in events] == [{"void": True}, {}]


@virtual_time
async def test_a_task_without_work_waits_longer_than_the_limit_of_a_claim(log: EventLog) -> None:
    tasks = [QueueTask(ADVANTAGE, WholeGroups(8)), QueueTask(SINK, WholeGroups(8))]
    queue = LocalQueue(tasks, LocalQueueConfig(timeout_s=5.0), clock=asyncio.get_running_loop().time)
    task = asyncio.create_task(advantage_task(make_context(queue, log), make_algorithm(GrpoConfig())).run())
    await asyncio.sleep(1000.0)  # as during a long training step, before which there is no more work
    await queue.put([replace(row, cells={**row.cells, "reward": 1.0, "reward_error": ""}) for row in group(["a", "b"])])
    assert len((await queue.claim("sink")).rows) == 2
    await queue.close()
    await task
