"""The asynchronous driver, around cores that fail or are watched."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import numpy as np
import pytest
import torch

from tailrace.engine.backends.fake import FakeCore, FakeEngine, RandomPlaywright, Script
from tailrace.engine.driver import DrivenEngine
from tailrace.errors import EngineError
from tailrace.types import FinishReason, Request, Sample
from tests.engine.helpers import collect, make_request

LIMIT_S = 30


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=1) as executor:
        yield executor


class FailingCore(FakeCore):
    """Its third step raises."""

    def step(self) -> list[Sample]:
        if self.stats().steps == 2:
            raise FloatingPointError("the third step")
        return super().step()


async def test_a_failing_step_reaches_every_stream_and_later_ones(executor: ThreadPoolExecutor) -> None:
    engine = DrivenEngine(FailingCore(RandomPlaywright(256)), executor)
    async with asyncio.timeout(LIMIT_S):
        streams = [engine.submit([make_request(i, max_new_tokens=9, ignore_eos=True)]) for i in range(3)]
        early = engine.submit([make_request(9, max_new_tokens=1)])
        results = await asyncio.gather(*map(collect, streams), return_exceptions=True)
        assert [str(result) for result in results] == ["generation failed: FloatingPointError: the third step"] * 3
        assert all(isinstance(result, EngineError) for result in results)
        assert list(await collect(early)) == [9], "what was finished before is still given"
        with pytest.raises(EngineError, match="the third step"):
            await collect(engine.submit([make_request(20)]))
        with pytest.raises(EngineError, match="the third step"):
            await engine.update_weights(1, [])
        with pytest.raises(EngineError, match="the third step"):
            await anext(streams[0])


async def test_a_failure_that_is_raised_often_does_not_grow(executor: ThreadPoolExecutor) -> None:
    engine = DrivenEngine(FailingCore(RandomPlaywright(256)), executor)
    raised = []
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(EngineError, match="the third step"):
            await collect(engine.submit([make_request(0, max_new_tokens=9, ignore_eos=True)]))
        for _ in range(2):
            with pytest.raises(EngineError, match="the third step") as caught:
                await engine.update_weights(1, [])
            raised.append(caught.value)
    failure = raised[0].__cause__
    assert isinstance(failure, EngineError)
    assert isinstance(failure.__cause__, FloatingPointError)
    assert raised[1].__cause__ is failure
    assert failure.__traceback__ is None, "it is never raised itself"


async def test_fakes_play_the_script_they_are_given(executor: ThreadPoolExecutor) -> None:
    def playwright(request: Request) -> Script:
        tokens = np.arange(request.request_id + 1)
        return Script(response_ids=tokens, log_probs=-tokens.astype(np.float32), finish_reason=FinishReason.STOP)

    engine = FakeEngine(executor=executor, playwright=playwright)
    async with asyncio.timeout(LIMIT_S):
        samples = [sample async for sample in engine.submit([make_request(i) for i in (3, 0, 1)])]
    assert [sample.request_id for sample in samples] == [0, 1, 3], "short responses finish first"
    assert samples[2].response_ids.tolist() == [0, 1, 2, 3]
    assert samples[2].rollout_log_probs.tolist() == [0, -1, -2, -3]


async def test_updates_get_in_between_the_steps_of_running_responses(executor: ThreadPoolExecutor) -> None:
    engine = FakeEngine(executor=executor, playwright=RandomPlaywright(256))
    async with asyncio.timeout(LIMIT_S):
        stream = engine.submit([make_request(0, max_new_tokens=50, ignore_eos=True)])
        steps = []
        for version in range(1, 6):
            await engine.update_weights(version, [])
            steps.append(engine.stats().steps)
        sample = (await collect(stream))[0]
    assert steps == sorted(steps)
    assert steps[-1] < 50
    assert sample.weight_versions.tolist() == sorted(sample.weight_versions.tolist())
    assert sample.weight_versions[-1] == 5


def tensors_after(release: asyncio.Event) -> Iterator[tuple[str, torch.Tensor]]:
    """No tensors, but not before `release`; to be read in another thread."""
    loop = asyncio.get_running_loop()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result(LIMIT_S)
        yield from ()

    return tensors()


async def turns_of_the_event_loop() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("cancellations", [1, 2])
async def test_a_cancelled_update_ends_before_the_next_step(executor: ThreadPoolExecutor, cancellations: int) -> None:
    engine = FakeEngine(executor=executor, playwright=RandomPlaywright(256))
    release = asyncio.Event()
    async with asyncio.timeout(LIMIT_S):
        update = asyncio.create_task(engine.update_weights(3, tensors_after(release)))
        await asyncio.sleep(0)
        stream = engine.submit([make_request(0, max_new_tokens=2)])
        for _ in range(cancellations):
            update.cancel()
            await turns_of_the_event_loop()
        assert not update.done()
        assert engine.stats().steps == 0
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await update
        assert set((await collect(stream))[0].weight_versions) == {3}


async def test_an_abort_that_is_cancelled_while_it_waits_still_happens(executor: ThreadPoolExecutor) -> None:
    engine = FakeEngine(executor=executor, playwright=RandomPlaywright(256))
    release = asyncio.Event()
    async with asyncio.timeout(LIMIT_S):
        update = asyncio.create_task(engine.update_weights(1, tensors_after(release)))
        await asyncio.sleep(0)
        stream = engine.submit([make_request(i, max_new_tokens=9, ignore_eos=True) for i in range(2)])
        abort = asyncio.create_task(engine.abort([0]))
        await asyncio.sleep(0)
        abort.cancel()
        await turns_of_the_event_loop()
        assert abort.cancelled()
        release.set()
        await update
        samples = await collect(stream)
    assert {i: (len(s.response_ids), s.finish_reason) for i, s in samples.items()} == {
        0: (0, FinishReason.ABORT),
        1: (9, FinishReason.LENGTH),
    }


async def test_a_consumer_that_leaves_early_frees_the_engine(executor: ThreadPoolExecutor) -> None:
    engine = FakeEngine(executor=executor, playwright=RandomPlaywright(256))
    async with asyncio.timeout(LIMIT_S):
        async with aclosing(engine.submit([make_request(i, max_new_tokens=5000, ignore_eos=True) for i in range(4)])):
            await asyncio.sleep(0)
        assert engine.stats().running == engine.stats().waiting == 0
