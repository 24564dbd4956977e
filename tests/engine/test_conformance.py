"""What every engine promises: the same claims for the native, the transformers and the fake one."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from tailrace.config.engine import EngineConfig, FakeEngineConfig, HfEngineConfig, NativeEngineConfig
from tailrace.engine.base import Engine
from tailrace.engine.factory import make_engine
from tailrace.errors import EngineError, RequestError
from tailrace.types import FinishReason
from tests.engine.helpers import TinyModel, collect, make_request, same_tokens

CONFIGS: list[EngineConfig] = [
    NativeEngineConfig(dtype="float32", block_size=8, kv_cache_gib=0.01),
    HfEngineConfig(),
    FakeEngineConfig(),
]
LIMIT_S = 60


@pytest.fixture(params=CONFIGS, ids=lambda config: config.type)
def config(request: pytest.FixtureRequest) -> EngineConfig:
    chosen: EngineConfig = request.param
    return chosen


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=1) as executor:
        yield executor


@pytest.fixture
def engine(config: EngineConfig, executor: ThreadPoolExecutor, tiny_model: TinyModel) -> Engine:
    return make_engine(config, tiny_model("llama"), device="cpu", executor=executor)


def test_making_an_engine_draws_no_progress_bar(
    config: EngineConfig, executor: ThreadPoolExecutor, tiny_model: TinyModel, capfd: pytest.CaptureFixture[str]
) -> None:
    model_dir = tiny_model("llama")
    capfd.readouterr()
    logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    make_engine(config, model_dir, device="cpu", executor=executor)
    assert "".join(capfd.readouterr()) == ""


async def test_every_request_gets_one_sample_with_aligned_arrays(engine: Engine) -> None:
    requests = [make_request(i, group_id=i // 4, max_new_tokens=3 + i) for i in range(8)]
    async with asyncio.timeout(LIMIT_S):
        samples = await collect(engine.submit(requests))
    assert sorted(samples) == list(range(8))
    for request in requests:
        sample = samples[request.request_id]
        assert sample.group_id == request.group_id
        assert 1 <= len(sample.response_ids) <= request.sampling.max_new_tokens
        arrays = (sample.response_ids, sample.rollout_log_probs, sample.weight_versions)
        assert {len(array) for array in arrays} == {len(sample.response_ids)}
        assert [array.dtype.name for array in arrays] == ["int64", "float32", "int64"]
        assert (sample.rollout_log_probs <= 0).all()
        assert (sample.finish_reason == FinishReason.LENGTH) == (len(sample.response_ids) == 3 + request.request_id)
    assert engine.stats().generated_tokens == sum(len(sample.response_ids) for sample in samples.values())
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)


async def test_ignoring_stops_gives_exactly_the_tokens_asked_for(engine: Engine) -> None:
    requests = [make_request(i, group_id=0, max_new_tokens=i + 1, ignore_eos=True) for i in range(6)]
    async with asyncio.timeout(LIMIT_S):
        samples = await collect(engine.submit(requests))
    assert [len(samples[i].response_ids) for i in range(6)] == [1, 2, 3, 4, 5, 6]
    assert {sample.finish_reason for sample in samples.values()} == {FinishReason.LENGTH}


async def test_the_seed_decides_the_tokens(engine: Engine) -> None:
    requests = [make_request(i, group_id=0, max_new_tokens=10) for i in range(3)]
    async with asyncio.timeout(LIMIT_S):
        first = await collect(engine.submit(requests))
        again = {i: s for request in requests for i, s in (await collect(engine.submit([request]))).items()}
    assert same_tokens(first, again)


async def test_streams_end_by_themselves_and_do_not_mix(engine: Engine) -> None:
    streams = [engine.submit([make_request(10 * i + j) for j in range(3)]) for i in range(3)]
    async with asyncio.timeout(LIMIT_S):
        samples = await asyncio.gather(*map(collect, streams))
    assert [sorted(ids) for ids in samples] == [[0, 1, 2], [10, 11, 12], [20, 21, 22]]


async def test_nothing_is_a_stream_that_ends_at_once(engine: Engine) -> None:
    assert await collect(engine.submit([])) == {}


async def test_paused_engines_make_nothing_and_go_on_when_resumed(engine: Engine) -> None:
    async with asyncio.timeout(LIMIT_S):
        await engine.pause_generation()
        stream = engine.submit([make_request(0, max_new_tokens=5)])
        for _ in range(20):
            await asyncio.sleep(0)
        assert engine.stats().steps == 0
        assert engine.stats().waiting + engine.stats().running == 1
        await engine.resume_generation()
        assert list(await collect(stream)) == [0]


async def test_a_pause_holds_between_two_steps(engine: Engine) -> None:
    async with asyncio.timeout(LIMIT_S):
        stream = engine.submit([make_request(i, max_new_tokens=40, ignore_eos=True) for i in range(3)])
        await asyncio.sleep(0)
        await engine.pause_generation()
        before = engine.stats()
        for _ in range(20):
            await asyncio.sleep(0)
        assert engine.stats() == before
        await engine.resume_generation()
        assert len(await collect(stream)) == 3


async def test_abort_finishes_requests_with_what_they_have(engine: Engine) -> None:
    async with asyncio.timeout(LIMIT_S):
        await engine.pause_generation()
        stream = engine.submit([make_request(i, max_new_tokens=5, ignore_eos=True) for i in range(3)])
        await engine.abort([1, 99])
        aborted = await anext(stream)
        assert (aborted.request_id, aborted.finish_reason) == (1, FinishReason.ABORT)
        assert len(aborted.response_ids) == len(aborted.rollout_log_probs) == 0
        await engine.resume_generation()
        assert sorted(await collect(stream)) == [0, 2]


async def test_closing_a_stream_aborts_its_requests(engine: Engine) -> None:
    async with asyncio.timeout(LIMIT_S):
        stream = engine.submit([make_request(i, max_new_tokens=4 + 300 * i, ignore_eos=True) for i in range(2)])
        async with aclosing(stream):
            assert (await anext(stream)).request_id == 0
        assert [sample async for sample in stream] == []
        assert (engine.stats().running, engine.stats().waiting) == (0, 0)
        again = await collect(engine.submit([make_request(1, max_new_tokens=2, ignore_eos=True)]))
        assert len(again[1].response_ids) == 2


async def test_request_ids_in_flight_are_refused(engine: Engine) -> None:
    async with asyncio.timeout(LIMIT_S):
        stream = engine.submit([make_request(0)])
        with pytest.raises(RequestError, match="request id 0 is in flight"):
            engine.submit([make_request(1), make_request(0)])
        with pytest.raises(RequestError, match="request id 5 is in flight"):
            engine.submit([make_request(5), make_request(5)])
        assert list(await collect(stream)) == [0]
        assert list(await collect(engine.submit([make_request(1), make_request(0)]))) in ([0, 1], [1, 0])


@pytest.mark.parametrize("tokens", [0, 100_000])
async def test_bad_prompts_are_refused_before_any_is_accepted(engine: Engine, tokens: int) -> None:
    with pytest.raises(RequestError, match="request 1 has"):
        engine.submit([make_request(0), make_request(1, prompt=tokens)])
    assert engine.stats().waiting == 0


async def test_tokens_carry_the_version_of_their_weights(engine: Engine, tiny_model: TinyModel) -> None:
    weights = AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.float32).state_dict()
    async with asyncio.timeout(LIMIT_S):
        before = await collect(engine.submit([make_request(0)]))
        await engine.update_weights(7, ((name, tensor) for name, tensor in weights.items()))
        after = await collect(engine.submit([make_request(0)]))
    assert set(before[0].weight_versions) == {0}
    assert set(after[0].weight_versions) == {7}
    assert same_tokens(before, after)
    assert engine.stats().version == 7


async def test_a_closed_engine_tells_its_streams(engine: Engine) -> None:
    async with asyncio.timeout(LIMIT_S):
        stream = engine.submit([make_request(0, max_new_tokens=200, ignore_eos=True)])
        waiting = asyncio.create_task(collect(stream))
        await asyncio.sleep(0)
        await engine.close()
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await waiting
        with pytest.raises(EngineError, match="closed"):
            await collect(engine.submit([make_request(1)]))


async def test_weights_that_break_off_leave_the_old_ones(engine: Engine, tiny_model: TinyModel) -> None:
    weights = AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.float32).state_dict()

    def breaking_off() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in list(weights.items())[:-1]:
            yield name, tensor * 2
        raise ConnectionError("the sender died")

    async with asyncio.timeout(LIMIT_S):
        before = await collect(engine.submit([make_request(0)]))
        with pytest.raises(ConnectionError, match="the sender died"):
            await engine.update_weights(1, breaking_off())
        after = await collect(engine.submit([make_request(0)]))
    assert before[0].rollout_log_probs.tolist() == after[0].rollout_log_probs.tolist()
    assert set(after[0].weight_versions) == {0}
    assert engine.stats().version == 0


@pytest.mark.parametrize("config", CONFIGS[:2], ids=lambda config: config.type, indirect=True)
async def test_wrong_weights_leave_the_old_ones(engine: Engine, tiny_model: TinyModel) -> None:
    weights = AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.float32).state_dict()
    doubled = {name: tensor * 2 for name, tensor in weights.items()}
    name = "model.norm.weight"
    async with asyncio.timeout(LIMIT_S):
        before = await collect(engine.submit([make_request(0)]))
        for wrong in (
            {key: tensor for key, tensor in doubled.items() if key != name},
            doubled | {"model.nrom.weight": doubled[name]},
            doubled | {name: doubled[name][:3]},
        ):
            with pytest.raises(EngineError, match=r"model\.(norm|nrom)\.weight"):
                await engine.update_weights(1, iter(wrong.items()))
        after = await collect(engine.submit([make_request(0)]))
    assert same_tokens(before, after)
    assert before[0].rollout_log_probs.tolist() == after[0].rollout_log_probs.tolist()
    assert set(after[0].weight_versions) == {0}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_native_and_transformers_agree_on_log_probs(
    executor: ThreadPoolExecutor, tiny_model: TinyModel, temperature: float
) -> None:
    hf = make_engine(CONFIGS[1], tiny_model("qwen3"), device="cpu", executor=executor)
    native = make_engine(CONFIGS[0], tiny_model("qwen3"), device="cpu", executor=executor)
    requests = [make_request(i, group_id=i, temperature=temperature, top_k=1 if temperature else 0) for i in range(4)]
    async with asyncio.timeout(LIMIT_S):
        expected, got = await collect(hf.submit(requests)), await collect(native.submit(requests))
    assert same_tokens(expected, got)
    for request_id, sample in expected.items():
        np.testing.assert_allclose(got[request_id].rollout_log_probs, sample.rollout_log_probs, atol=1e-4)
