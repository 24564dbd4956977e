"""The engine in virtual time takes as long as its steps cost, and makes the same tokens however it is interrupted."""

import asyncio
import random
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest

from tailrace.conformance.requests import make_request
from tailrace.engine.timed import TimedEngine, tokens_by_seed
from tailrace.planning.dispatch.costs import StepCosts
from tailrace.planning.drain import drain_s
from tailrace.types import FinishReason, Request, Sample
from tests.transfer.virtual_time import virtual_time

COSTS = StepCosts(base=0.01, each=0.001, context=1e-6, prefill=1e-4)


def requests(count: int, *, most: int = 200) -> list[Request]:
    return [make_request(number, group_id=number, prompt=10, max_new_tokens=most) for number in range(count)]


async def finished(engine: TimedEngine, asked: list[Request]) -> dict[int, Sample]:
    async with aclosing(engine.submit(asked)) as samples:
        return {sample.request_id: sample async for sample in samples}


@virtual_time
async def test_a_batch_takes_as_long_as_the_planner_predicts() -> None:
    asked = requests(20)
    start = asyncio.get_running_loop().time()
    samples = await finished(TimedEngine(COSTS, slots=8), asked)
    works = [(len(request.prompt_ids), len(samples[request.request_id].response_ids)) for request in asked]
    seconds = asyncio.get_running_loop().time() - start
    assert seconds == pytest.approx(drain_s(COSTS, 1, [[]], works, slots=8), rel=0.02)


@virtual_time
async def test_a_response_is_the_same_however_often_it_is_cut_and_goes_on() -> None:
    chance = random.Random(0)
    asked = requests(12)
    whole = await finished(TimedEngine(COSTS, slots=12), asked)
    engines = [TimedEngine(COSTS, slots=5), TimedEngine(COSTS, slots=9)]
    begun = dict(enumerate(asked))
    done: dict[int, Sample] = {}
    while begun:
        engine = engines[len(done) % 2]
        async with aclosing(engine.submit(list(begun.values()))) as samples:
            await asyncio.sleep(chance.uniform(0, 1))
            await engine.abort(list(begun))
            async for sample in samples:
                request = begun.pop(sample.request_id)
                if sample.finish_reason is FinishReason.ABORT:
                    begun[sample.request_id] = replace(request, begun=sample)
                else:
                    done[sample.request_id] = sample
    for number, sample in done.items():
        assert (
            sample.response_ids.tolist()
            == whole[number].response_ids.tolist()
            == tokens_by_seed(asked[number]).tolist()
        )
        assert len(sample.weight_versions) == len(sample.rollout_log_probs) == len(sample.response_ids)


@virtual_time
async def test_tokens_carry_the_version_that_made_them() -> None:
    engine = TimedEngine(COSTS, slots=4)
    asked = [replace(request, seed=3) for request in requests(1)]
    async with aclosing(engine.submit(asked)) as samples:
        await asyncio.sleep(0.3)
        before = engine.load()
        assert before is not None
        await engine.update_weights(5, ())
        sample = await anext(samples)
    assert set(sample.weight_versions.tolist()) == {0, 5}
    first = int(np.count_nonzero(sample.weight_versions == 0))
    assert first - before.made[0] in (0, 1), "the step under way ends with the old weights"


@virtual_time
async def test_a_pause_during_an_update_outlasts_it() -> None:
    engine = TimedEngine(COSTS, slots=4)
    async with aclosing(engine.submit(requests(1))) as samples:
        await asyncio.sleep(0.3)
        updating = asyncio.create_task(engine.update_weights(5, ()))
        await asyncio.sleep(0)
        await engine.pause_generation()
        await updating
        made = engine.stats().generated_tokens
        await asyncio.sleep(100)
        assert engine.stats().generated_tokens == made
        await engine.resume_generation()
        assert 5 in (await anext(samples)).weight_versions


@virtual_time
async def test_the_largest_priority_begins_first() -> None:
    engine = TimedEngine(COSTS, slots=1)
    asked = [replace(request, priority=float(request.request_id)) for request in requests(4)]
    await engine.pause_generation()
    stream = engine.submit(asked)
    await engine.resume_generation()
    assert [sample.request_id async for sample in stream] == [3, 2, 1, 0]
