"""The asynchronous driver around cores that fail or are watched."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import numpy as np
import pytest
import torch

from tailrace.conformance.requests import collect, make_request
from tailrace.engine.backends.fake import FakeCore, FakeEngine, RandomPlaywright, Script
from tailrace.engine.base import SampleStream
from tailrace.engine.driver import DrivenEngine
from tailrace.engine.model.weights import Weights
from tailrace.errors import EngineError, RequestError
from tailrace.types import FinishReason, Request, Sample, WeightVersion

LIMIT_S = 30


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=1) as executor:
        yield executor


class FailingCore(FakeCore):
    """A core whose third step raises."""

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


def tensors_after(release: asyncio.Event, asked: asyncio.Event) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield no tensors, but only after `release`. Another thread reads this, which sets `asked`."""
    loop = asyncio.get_running_loop()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        loop.call_soon_threadsafe(asked.set)
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result(LIMIT_S)
        yield from ()

    return tensors()


async def turns_of_the_event_loop() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("cancellations", [1, 2])
async def test_a_cancelled_update_ends_before_the_next_step(executor: ThreadPoolExecutor, cancellations: int) -> None:
    engine = FakeEngine(executor=executor, playwright=RandomPlaywright(256))
    release, asked = asyncio.Event(), asyncio.Event()
    async with asyncio.timeout(LIMIT_S):
        update = asyncio.create_task(engine.update_weights(3, tensors_after(release, asked)))
        await asked.wait()
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
    release, asked = asyncio.Event(), asyncio.Event()
    async with asyncio.timeout(LIMIT_S):
        update = asyncio.create_task(engine.update_weights(1, tensors_after(release, asked)))
        await asked.wait()
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


async def test_an_abort_that_is_cancelled_gives_the_samples_of_a_paused_engine(executor: ThreadPoolExecutor) -> None:
    engine = FakeEngine(executor=executor, playwright=RandomPlaywright(256))
    release, asked = asyncio.Event(), asyncio.Event()
    async with asyncio.timeout(LIMIT_S):
        await engine.pause_generation()
        stream = engine.submit([make_request(0)])
        update = asyncio.create_task(engine.update_weights(1, tensors_after(release, asked)))
        await asked.wait()
        abort = asyncio.create_task(engine.abort([0]))
        await asyncio.sleep(0)
        abort.cancel()
        await turns_of_the_event_loop()
        release.set()
        await update
        assert (await anext(stream)).finish_reason == FinishReason.ABORT
        assert engine.stats().steps == 0


class ChoosyCore(FakeCore):
    """A core that refuses odd requests, which its check has accepted."""

    def add(self, request: Request) -> None:
        if request.request_id % 2:
            raise OverflowError("Python int too large")
        super().add(request)


async def test_a_request_that_the_core_does_not_take_fails_alone(executor: ThreadPoolExecutor) -> None:
    engine = DrivenEngine(ChoosyCore(RandomPlaywright(256)), executor)
    async with asyncio.timeout(LIMIT_S):
        stream, other = engine.submit([make_request(i) for i in range(3)]), engine.submit([make_request(4)])
        with pytest.raises(RequestError, match="request 1 was refused: Python int too large"):
            await anext(stream)
        assert sorted(await collect(stream)) == [0, 2]
        assert list(await collect(other)) == [4]
        assert sorted(await collect(engine.submit([make_request(6)]))) == [6]


async def test_aborting_does_not_meet_the_error_of_a_request_that_was_refused(executor: ThreadPoolExecutor) -> None:
    engine = DrivenEngine(ChoosyCore(RandomPlaywright(256)), executor)
    async with asyncio.timeout(LIMIT_S):
        stream = engine.submit([make_request(0), make_request(1)])
        await engine.abort([0, 1])
        with pytest.raises(RequestError, match="request 1 was refused"):
            await anext(stream)
        assert (await collect(stream))[0].finish_reason == FinishReason.ABORT


@pytest.mark.parametrize("closing", [False, True])
async def test_the_end_of_a_stream_reaches_all_who_wait(executor: ThreadPoolExecutor, closing: bool) -> None:
    engine = FakeEngine(executor=executor, playwright=RandomPlaywright(256))
    async with asyncio.timeout(LIMIT_S):
        await engine.pause_generation()
        stream = engine.submit([make_request(0)])
        consumers = [asyncio.create_task(collect(stream)) for _ in range(3)]
        await turns_of_the_event_loop()
        await (stream.aclose() if closing else engine.resume_generation())
        assert sorted(len(samples) for samples in await asyncio.gather(*consumers)) == [0, 0, 0 if closing else 1]


def test_an_engine_can_be_closed_in_another_event_loop(executor: ThreadPoolExecutor) -> None:
    engine = FakeEngine(executor=executor, playwright=RandomPlaywright(256))

    async def generate() -> None:
        await collect(engine.submit([make_request(0)]))

    asyncio.run(generate())
    asyncio.run(engine.close())
    asyncio.run(engine.close())


async def test_a_consumer_that_leaves_early_frees_the_engine(executor: ThreadPoolExecutor) -> None:
    engine = FakeEngine(executor=executor, playwright=RandomPlaywright(256))
    async with asyncio.timeout(LIMIT_S):
        async with aclosing(engine.submit([make_request(i, max_new_tokens=5000, ignore_eos=True) for i in range(4)])):
            await asyncio.sleep(0)
        assert engine.stats().running == engine.stats().waiting == 0


class SettlingCore(FakeCore):
    """A core whose finished samples come with `settle`, as from ranks that compute beside the last step."""

    def __init__(self) -> None:
        super().__init__(RandomPlaywright(256))
        self.error: Exception | None = None
        self.release = threading.Event()
        self._finished: list[Sample] = []

    def step(self) -> list[Sample]:
        self._finished += super().step()
        return []

    def settle(self) -> list[Sample]:
        assert self.release.wait(LIMIT_S)
        if self.error is not None:
            raise self.error
        samples, self._finished = self._finished, []
        return samples


async def finished_stream(core: SettlingCore, engine: DrivenEngine) -> SampleStream:
    """The stream of request 0, which has finished in the core and awaits `settle`."""
    stream = engine.submit([make_request(0, max_new_tokens=2, ignore_eos=True)])
    while core.stats().steps < 2 or core.has_work:
        await asyncio.sleep(0)
    return stream


@pytest.mark.parametrize("call", ["pause", "update"])
async def test_a_failure_to_settle_reaches_every_stream(executor: ThreadPoolExecutor, call: str) -> None:
    core = SettlingCore()
    engine = DrivenEngine(core, executor)
    async with asyncio.timeout(LIMIT_S):
        stream = await finished_stream(core, engine)
        core.error = FloatingPointError("while settling")
        core.release.set()
        with pytest.raises(FloatingPointError, match="while settling"):
            await (engine.pause_generation() if call == "pause" else engine.update_weights(1, []))
        assert engine.stats().version == 0
        for failed in (stream, engine.submit([make_request(1)])):
            with pytest.raises(EngineError, match="generation failed: FloatingPointError: while settling"):
                await collect(failed)


@pytest.mark.parametrize("error", [None, EngineError("a rank")])
async def test_a_pause_that_is_cancelled_gives_what_has_finished_meanwhile(
    executor: ThreadPoolExecutor, error: EngineError | None
) -> None:
    core = SettlingCore()
    core.error = error
    engine = DrivenEngine(core, executor)
    async with asyncio.timeout(LIMIT_S):
        stream = await finished_stream(core, engine)
        pause = asyncio.create_task(engine.pause_generation())
        await turns_of_the_event_loop()
        pause.cancel()
        await turns_of_the_event_loop()
        core.release.set()
        with pytest.raises(asyncio.CancelledError):
            await pause
        if error is None:
            assert list(await collect(stream)) == [0]
        else:
            with pytest.raises(EngineError, match="a rank"):
                await collect(stream)


async def test_an_update_gives_what_has_finished_with_the_old_weights(executor: ThreadPoolExecutor) -> None:
    core = SettlingCore()
    engine = DrivenEngine(core, executor)
    async with asyncio.timeout(LIMIT_S):
        stream = await finished_stream(core, engine)
        core.release.set()
        await engine.update_weights(1, [])
        assert (await collect(stream))[0].weight_versions.tolist() == [0, 0]


class TearingCore(FakeCore):
    """A core that fails while it copies version 1."""

    def load_weights(self, version: WeightVersion, tensors: Weights) -> None:
        self.weights_are_whole = version != 1
        if version == 1:
            raise MemoryError("no room for the last one")
        super().load_weights(version, tensors)


@pytest.mark.parametrize("mended", [True, False])
async def test_weights_that_were_copied_in_part_are_not_generated_with(
    executor: ThreadPoolExecutor, mended: bool
) -> None:
    engine = DrivenEngine(TearingCore(RandomPlaywright(256)), executor)
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(MemoryError):
            await engine.update_weights(1, [])
        if mended:
            await engine.update_weights(2, [])
            assert set((await collect(engine.submit([make_request(0)])))[0].weight_versions) == {2}
        else:
            with pytest.raises(EngineError, match="failed halfway"):
                await collect(engine.submit([make_request(0)]))


class HangingCore(FakeCore):
    """A core whose step hangs until it is interrupted."""

    def __init__(self) -> None:
        super().__init__(RandomPlaywright(256))
        self.interrupted = threading.Event()

    def step(self) -> list[Sample]:
        assert self.interrupted.wait(LIMIT_S)
        raise EngineError("interrupted")

    def interrupt(self) -> None:
        self.interrupted.set()


async def test_closing_does_not_wait_for_a_step_that_hangs(executor: ThreadPoolExecutor) -> None:
    core = HangingCore()
    engine = DrivenEngine(core, executor)
    async with asyncio.timeout(LIMIT_S):
        stream = engine.submit([make_request(0)])
        await turns_of_the_event_loop()
        await engine.close()
        assert core.interrupted.is_set()
        with pytest.raises(EngineError, match="the engine was closed"):
            await collect(stream)
