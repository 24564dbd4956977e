"""Responses of given lengths, with waits in place of tools."""

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from tailrace.activity import Activity
from tailrace.conformance.requests import make_request
from tailrace.conformance.tiny import write_tiny_model
from tailrace.engine.backends.fake import FakeEngine, RandomPlaywright
from tailrace.engine.backends.fake import Script as Written
from tailrace.engine.base import SampleStream
from tailrace.engine.core import EngineCore
from tailrace.engine.driver import DrivenEngine
from tailrace.errors import EngineError
from tailrace.events import EventLog
from tailrace.tasks.replay import ReplayStream, response_mask
from tailrace.types import Request, Sample
from tailrace.workloads.replay import Script, Turn
from tests.conftest import TinyModel
from tests.engine.helpers import TINY_GIB, make_core
from tests.engine.test_adaptive import config_of, profile_of
from tests.tasks.schedules import Device
from tests.transfer.virtual_time import virtual_time

CPU = torch.device("cpu")
TWO_TURNS = (Turn(generated_tokens=4, returned_tokens=3, tool_s=30.0), Turn(generated_tokens=2))


def idle_worker() -> Activity:
    return Activity(EventLog(sinks=()), "engine")


def scripts_of(count: int, *, longest: int, seed: int = 0) -> dict[int, Script]:
    """Scripts of random lengths, every third of two turns."""
    chance = random.Random(seed)

    def turns(number: int) -> tuple[Turn, ...]:
        last = Turn(generated_tokens=chance.randint(1, longest))
        return (last,) if number % 3 else (Turn(generated_tokens=3, returned_tokens=chance.randint(0, 5)), last)

    return {number: Script(prompt_tokens=5, turns=turns(number)) for number in range(count)}


async def replayed(engine: DrivenEngine, scripts: dict[int, Script]) -> dict[int, Sample]:
    requests = [make_request(number, group_id=number // 2, prompt=5, max_new_tokens=1) for number in scripts]
    async with aclosing(ReplayStream(engine, idle_worker(), requests, scripts)) as stream:
        return {sample.request_id: sample async for sample in stream}


def assert_exact(samples: dict[int, Sample], scripts: dict[int, Script]) -> None:
    assert samples.keys() == scripts.keys()
    for number, script in scripts.items():
        sample = samples[number]
        assert len(sample.response_ids) == len(response_mask(script)) == script.tokens
        assert len(sample.rollout_log_probs) == len(sample.weight_versions) == script.tokens
        answers = response_mask(script) == 0
        assert (sample.rollout_log_probs[answers] == 0).all()
        assert (sample.rollout_log_probs[~answers] < 0).all()


@virtual_time
async def test_a_conversation_goes_on_when_its_tool_has_answered() -> None:
    engine = FakeEngine(executor=Device(random.Random(0), slowest=1.0), playwright=RandomPlaywright(50))
    scripts = {0: Script(prompt_tokens=5, turns=TWO_TURNS), 1: Script(prompt_tokens=5, turns=TWO_TURNS[1:])}
    start = asyncio.get_running_loop().time()
    ended = {}
    requests = [make_request(number, prompt=5, max_new_tokens=1) for number in scripts]
    async with aclosing(ReplayStream(engine, idle_worker(), requests, scripts)) as stream:
        async for sample in stream:
            ended[sample.request_id] = asyncio.get_running_loop().time() - start
            assert_exact({sample.request_id: sample}, {sample.request_id: scripts[sample.request_id]})
    assert ended[1] < 6 < 30 < ended[0] < 36, "at most six steps of a second, and the tool"
    assert response_mask(scripts[0]).tolist() == [1, 1, 1, 1, 0, 0, 0, 1, 1]


@virtual_time
async def test_a_closed_replay_leaves_nothing_in_the_engine() -> None:
    engine = FakeEngine(executor=Device(random.Random(0), slowest=1.0), playwright=RandomPlaywright(50))
    scripts = {number: Script(prompt_tokens=5, turns=(TWO_TURNS[1], *TWO_TURNS)) for number in range(3)}
    stream = ReplayStream(
        engine, idle_worker(), [make_request(number, prompt=5, max_new_tokens=1) for number in scripts], scripts
    )
    await asyncio.sleep(2.5)  # all are in their second turn
    await stream.aclose()
    assert engine.stats().running == engine.stats().waiting == 0
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@virtual_time
async def test_an_error_of_the_engine_reaches_who_reads_the_replay() -> None:
    engine = FakeEngine(executor=Device(random.Random(0), slowest=1.0), playwright=RandomPlaywright(50))
    scripts = {0: Script(prompt_tokens=5, turns=TWO_TURNS)}
    stream = ReplayStream(engine, idle_worker(), [make_request(0, prompt=5, max_new_tokens=1)], scripts)
    await asyncio.sleep(10)  # the tool is at work
    await engine.close()
    with pytest.raises(EngineError, match="the engine was closed"):
        await anext(stream)


class _Ending(SampleStream):
    """A stream that ends, or fails, before it has given a sample."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def __anext__(self) -> Sample:
        raise self._error

    async def aclose(self) -> None:
        pass


@virtual_time
@pytest.mark.parametrize("turn", [1, 2])
@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (StopAsyncIteration(), EngineError, "the engine ended its stream without"),
        (RuntimeError("a bug of an adapter"), RuntimeError, "a bug of an adapter"),
    ],
)
async def test_who_reads_a_replay_does_not_wait_for_an_engine_that_breaks_its_contract(
    monkeypatch: pytest.MonkeyPatch, turn: int, error: Exception, raised: type[Exception], message: str
) -> None:
    engine = FakeEngine(executor=Device(random.Random(0), slowest=1.0), playwright=RandomPlaywright(50))
    submit, submitted = engine.submit, iter([1, 2])
    monkeypatch.setattr(
        engine, "submit", lambda requests: _Ending(error) if next(submitted) == turn else submit(requests)
    )
    scripts = {0: Script(prompt_tokens=5, turns=TWO_TURNS)}
    async with aclosing(
        ReplayStream(engine, idle_worker(), [make_request(0, prompt=5, max_new_tokens=1)], scripts)
    ) as stream:
        with pytest.raises(raised, match=message):
            async with asyncio.timeout(100):
                await anext(stream)


@virtual_time
@pytest.mark.parametrize("turns", [TWO_TURNS[1:], TWO_TURNS])
async def test_an_engine_that_ends_a_response_early_is_an_error(turns: tuple[Turn, ...]) -> None:
    """It does not heed `ignore_eos`: each turn ends a token early."""
    generous = RandomPlaywright(50)

    def early(request: Request) -> Written:
        written = generous(request)
        return replace(written, response_ids=written.response_ids[1:], log_probs=written.log_probs[1:])

    engine = FakeEngine(executor=Device(random.Random(0), slowest=1.0), playwright=early)
    script = Script(prompt_tokens=5, turns=turns)
    message = (
        f"a response of {script.tokens - len(turns)} tokens in group 7, where the replayed trace has {script.tokens}; "
        "a replay needs an engine that heeds `ignore_eos`"
    )
    requests = [make_request(0, group_id=7, prompt=5, max_new_tokens=1)]
    async with aclosing(ReplayStream(engine, idle_worker(), requests, {0: script})) as stream:
        with pytest.raises(EngineError, match=message):
            await anext(stream)


async def test_lengths_are_exact_where_sequences_are_preempted(tiny_model: TinyModel) -> None:
    core = make_core(tiny_model("llama"), kv_cache_gib=25 * 4 * TINY_GIB["llama"], prefill_tokens=7)
    scripts = scripts_of(16, longest=40)
    with ThreadPoolExecutor(1) as executor:
        engine = DrivenEngine(core, executor)
        assert_exact(await replayed(engine, scripts), scripts)
        await engine.close()
    assert core.stats().preemptions > 3


async def test_lengths_are_exact_where_the_ranks_are_rearranged(tmp_path: Path) -> None:
    model = write_tiny_model("llama", tmp_path / "llama", seed=0)
    config = config_of(tmp_path / "profile.json")
    (tmp_path / "profile.json").write_bytes(msgspec.json.encode(profile_of(model, config)))
    scripts = scripts_of(8, longest=90)
    with closing(EngineCore(config, model, device=CPU)) as core, ThreadPoolExecutor(1) as executor:
        samples = await replayed(DrivenEngine(core, executor), scripts)
        assert_exact(samples, scripts)
        assert core.stats().switches > 0
    assert np.isfinite(np.concatenate([sample.rollout_log_probs for sample in samples.values()])).all()
