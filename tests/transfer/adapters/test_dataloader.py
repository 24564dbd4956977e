import asyncio
import random
from functools import partial

import numpy as np
import pytest

from tailrace.errors import QueueTimeout
from tailrace.planning.balance import partition
from tailrace.transfer.queue.adapters.dataloader import StreamingLoader
from tailrace.transfer.queue.base import NewRow, Row, TransferQueue
from tailrace.transfer.queue.policies.balanced import BalancedByLength
from tailrace.transfer.queue.policies.first_in import FirstIn
from tailrace.transfer.queue.policies.groups import WholeGroups
from tailrace.transfer.queue.policies.token_budget import TokenBudget
from tailrace.types import Value
from tests.transfer.tables import group, one_task, orders, outputs, queue_of, table, tokens
from tests.transfer.virtual_time import virtual_time

GROUPS, SIZE, STEPS = 250, 8, 10
ROWS = GROUPS * SIZE


@virtual_time
async def test_a_loader_yields_claims_until_its_rows_are_claimed() -> None:
    queue = queue_of(one_task(FirstIn(3)))
    await queue.put(group(1, 8))
    claims = [orders(claim) async for claim in StreamingLoader(queue, "only", rows=7)]
    assert claims == [[100, 101, 102], [103, 104, 105], [106]]
    assert (await queue.stats()).tasks["only"].ready == 1


@virtual_time
async def test_the_last_claim_is_not_held_back_for_a_full_budget() -> None:
    queue = queue_of(one_task(TokenBudget(12, window=1, response_column="prompt_ids")))
    await queue.put(group(1) + group(2) + group(3) + group(4))
    claims = [orders(claim) async for claim in StreamingLoader(queue, "only", rows=4)]
    assert claims == [[100, 200, 300], [400]]


@virtual_time
async def test_what_an_abandoned_loader_has_claimed_is_the_callers_to_nack() -> None:
    queue = queue_of(one_task(FirstIn(1)))
    await queue.put(group(1, 2))
    claim = await anext(StreamingLoader(queue, "only", rows=2))
    assert (await queue.stats()).tasks["only"].leased == 1
    await queue.nack(claim)
    assert (await queue.stats()).tasks["only"].ready == 2


@virtual_time
async def test_a_loader_of_a_rank_yields_the_parts_of_that_rank() -> None:
    queue = queue_of(
        one_task(BalancedByLength(2, 4, partition=partial(partition, equal_count=False), cost_columns=("prompt_ids",)))
    )
    await queue.put(group(1, 4) + group(2, 4))
    claims = []
    for _ in range(2):
        for rank in (0, 1):
            claims.append(orders(await anext(StreamingLoader(queue, "only", rows=2, rank=rank))))
    assert sorted(order for claim in claims for order in claim) == [100, 101, 102, 103, 200, 201, 202, 203]
    assert [len(claim) for claim in claims] == [2, 2, 2, 2]


@virtual_time
async def test_a_loader_waits_as_long_as_it_is_told() -> None:
    queue = queue_of(one_task(FirstIn(1)))
    with pytest.raises(QueueTimeout, match="waited 2 s"):
        await anext(StreamingLoader(queue, "only", rows=1, timeout=2))


async def produce(queue: TransferQueue) -> None:
    for number in range(GROUPS):
        cells: dict[str, Value] = {"prompt_ids": tokens(1 + number % 7)}
        order = number * SIZE
        await queue.put([NewRow(group_id=number, group_size=SIZE, order=order + i, cells=cells) for i in range(SIZE)])


async def work(queue: TransferQueue, task: str, seed: int, *, careless: bool) -> None:
    """Claim and ack for ever, row by row and out of order. If `careless`, drop one claim in ten and nack another."""
    rng = random.Random(seed)
    while True:
        claim = await queue.claim(task)
        await asyncio.sleep(rng.random() if careless else 0)
        chance = rng.random()
        if careless and chance < 0.1:
            continue
        if careless and chance < 0.2:
            await queue.nack(claim)
            continue
        for row in rng.sample(claim.rows, len(claim.rows)):
            await queue.ack(claim, {row.id: answer(task, row)})


def answer(task: str, row: Row) -> dict[str, Value]:
    """The response to a prompt, or a reward: the sum of the response's tokens."""
    if task == "rollout":
        return {"response_ids": tokens(1 + row.order % 11)}
    return {"reward": float(np.sum(np.asarray(row.cells["response_ids"])))}


async def train(queue: TransferQueue) -> list[int]:
    """The orders of the rows that the actor got, step after step."""
    trained = []
    for _ in range(STEPS):
        async for claim in StreamingLoader(queue, "actor", rows=ROWS // STEPS):
            for row in claim.rows:
                assert row.cells["reward"] == np.sum(tokens(1 + row.order % 11))
            trained += orders(claim)
            await queue.ack(claim, outputs(claim))
    return trained


async def run_pipeline(*, careless: bool, window: int | None) -> list[int]:
    """Pass 2,000 rows through 3 tasks and a queue that holds 80. Return the orders in which they were trained."""
    policies = FirstIn(3), WholeGroups(2), TokenBudget(200, window=window)
    queue = queue_of(table(*policies), max_rows=80, lease_s=10)
    workers = [
        asyncio.create_task(work(queue, task, seed, careless=careless))
        for seed, task in enumerate(["rollout"] * 4 + ["reward"] * 2)
    ]
    async with asyncio.timeout(3000 if careless else 60):
        trained, _ = await asyncio.gather(train(queue), produce(queue))
    for worker in workers:
        worker.cancel()
    ended = await asyncio.gather(*workers, return_exceptions=True)
    assert all(isinstance(error, asyncio.CancelledError) for error in ended), ended
    stats = await queue.stats()
    assert (stats.rows, stats.bytes) == (0, 0)
    assert all(task.consumed == ROWS for task in stats.tasks.values())
    assert any(task.expired for task in stats.tasks.values()) == careless
    return trained


async def test_two_thousand_rows_pass_three_tasks_in_order() -> None:
    assert await run_pipeline(careless=False, window=1) == list(range(ROWS))


@virtual_time
async def test_workers_that_drop_and_return_claims_lose_nothing() -> None:
    assert await run_pipeline(careless=True, window=1) == list(range(ROWS))


@virtual_time
async def test_out_of_order_every_row_is_trained_once() -> None:
    trained = await run_pipeline(careless=True, window=None)
    assert sorted(trained) == list(range(ROWS))
    assert trained != sorted(trained)
