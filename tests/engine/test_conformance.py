"""What every engine promises: the same claims for all of them.

An engine is made once and serves all tests, since some take seconds to start: tests count from what they find, and the
last one closes it.
"""

import asyncio
import copy
import importlib.util
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.utils import logging

from tailrace.config.engine import (
    EngineConfig,
    FakeEngineConfig,
    HfEngineConfig,
    NativeEngineConfig,
    VllmEngineConfig,
)
from tailrace.engine.base import Engine
from tailrace.engine.factory import make_engine
from tailrace.errors import EngineError, RequestError
from tailrace.types import FinishReason, FloatArray, Request, Sample
from tests.engine.helpers import TinyModel, collect, make_request, same_tokens
from tests.tiny import make_tokenizer

LIMIT_S = 60
NEEDS_VLLM = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not in this environment; make test-vllm has one with it"
)
CONFIGS = {
    "native": NativeEngineConfig(dtype="float32", block_size=8, kv_cache_gib=0.01, prefill_tokens=300),
    "native-bf16": NativeEngineConfig(kv_cache_gib=0.01),
    "native-tp2": NativeEngineConfig(dtype="float32", tp=2, block_size=8, kv_cache_gib=0.01),
    "native-dp2": NativeEngineConfig(dtype="float32", dp=2, block_size=8, kv_cache_gib=0.01),
    "vllm": VllmEngineConfig(dtype="float32", kv_cache_gib=0.01, max_batch_size=8),
    "hf": HfEngineConfig(),
    "fake": FakeEngineConfig(),
}
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}
"""Of a log-probability."""

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(config, id=name, marks=NEEDS_VLLM if name == "vllm" else ()) for name, config in CONFIGS.items()
    ],
)
def config(request: pytest.FixtureRequest) -> EngineConfig:
    chosen: EngineConfig = request.param
    return chosen


@pytest.fixture(scope="module")
def model_dir(tiny_model: TinyModel) -> Path:
    return tiny_model("llama", head_dim=32)  # vLLM's attention on a CPU knows no smaller heads


@pytest.fixture(scope="module")
def model(model_dir: Path) -> PreTrainedModel:
    oracle: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    return oracle


@pytest.fixture(scope="module")
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=1) as executor:
        yield executor


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(config: EngineConfig, executor: ThreadPoolExecutor, model_dir: Path) -> AsyncIterator[Engine]:
    engine = make_engine(config, model_dir, device="cpu", executor=executor)
    yield engine
    await engine.close()


def needs_model(config: EngineConfig) -> None:
    if isinstance(config, FakeEngineConfig):
        pytest.skip("the fake engine plays scripts: it has neither weights nor a tokenizer")


def needs_steps(config: EngineConfig) -> None:
    if isinstance(config, HfEngineConfig):
        pytest.skip("the transformers engine makes a whole response in one step")


async def made_tokens(engine: Engine, count: int) -> None:
    """Return once `engine` has made `count` more tokens."""
    target = engine.stats().generated_tokens + count
    while engine.stats().generated_tokens < target:
        await asyncio.sleep(0)


def log_probs_by_transformers(model: PreTrainedModel, request: Request, sample: Sample) -> FloatArray:
    """[R], of the response's tokens under the distributions that they were to be sampled from."""
    sampling = request.sampling
    warpers = LogitsProcessorList()
    if sampling.temperature > 0:
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            warpers.append(TopKLogitsWarper(sampling.top_k))
        warpers += [TopPLogitsWarper(sampling.top_p), MinPLogitsWarper(sampling.min_p)]
    tokens = torch.LongTensor(np.concatenate([request.prompt_ids, sample.response_ids]))
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, len(request.prompt_ids) - 1 : -1]
    log_probs = warpers(tokens[None], logits).log_softmax(-1).numpy()  # type: ignore[arg-type]
    chosen: FloatArray = log_probs[np.arange(len(log_probs)), sample.response_ids]
    return chosen


def agree(config: EngineConfig, got: FloatArray, expected: FloatArray) -> bool:
    """Whether log-probs are equal, up to rounding; in bfloat16 a few tokens may lie beyond a truncation's edge."""
    dtype = getattr(config, "dtype", "float32")
    near = np.abs(got - expected) <= TOLERANCE[dtype]
    return bool(near.mean() >= (1.0 if dtype == "float32" else 0.9))


async def test_making_an_engine_writes_nothing_to_the_terminal(
    config: EngineConfig, executor: ThreadPoolExecutor, model_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    capfd.readouterr()
    engine = make_engine(config, model_dir, device="cpu", executor=executor)
    async with asyncio.timeout(LIMIT_S):
        await collect(engine.submit([make_request(0)]))
        await engine.close()
    assert "".join(capfd.readouterr()) == ""


async def test_every_request_gets_one_sample_with_aligned_arrays(engine: Engine) -> None:
    requests = [make_request(i, group_id=i // 4, max_new_tokens=3 + i) for i in range(8)]
    before = engine.stats().generated_tokens
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
    assert engine.stats().generated_tokens - before == sum(len(sample.response_ids) for sample in samples.values())
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)


async def test_ignoring_stops_gives_exactly_the_tokens_asked_for(engine: Engine) -> None:
    requests = [make_request(i, group_id=0, max_new_tokens=i + 1, ignore_eos=True) for i in range(6)]
    async with asyncio.timeout(LIMIT_S):
        samples = await collect(engine.submit(requests))
    assert [len(samples[i].response_ids) for i in range(6)] == [1, 2, 3, 4, 5, 6]
    assert {sample.finish_reason for sample in samples.values()} == {FinishReason.LENGTH}


async def test_a_response_ends_where_the_context_does(engine: Engine) -> None:
    prompt = engine.max_model_len - 3
    async with asyncio.timeout(LIMIT_S):
        sample = (await collect(engine.submit([make_request(0, prompt=prompt, ignore_eos=True)])))[0]
    assert (len(sample.response_ids), sample.finish_reason) == (3, FinishReason.LENGTH)


async def test_a_stop_token_ends_a_response_and_is_kept(config: EngineConfig, engine: Engine) -> None:
    needs_model(config)
    async with asyncio.timeout(LIMIT_S):
        whole = (await collect(engine.submit([make_request(0, max_new_tokens=12, ignore_eos=True)])))[0]
        stop = int(whole.response_ids[4])
        cut = (await collect(engine.submit([make_request(0, max_new_tokens=12, stop_token_ids=[stop])])))[0]
    expected = whole.response_ids[: whole.response_ids.tolist().index(stop) + 1]
    assert cut.response_ids.tolist() == expected.tolist()
    assert cut.finish_reason == FinishReason.STOP


async def test_a_stop_string_ends_a_response_with_the_token_that_completes_it(
    config: EngineConfig, engine: Engine
) -> None:
    needs_model(config)
    async with asyncio.timeout(LIMIT_S):
        whole = (await collect(engine.submit([make_request(0, max_new_tokens=40)])))[0]
        texts = [str(make_tokenizer().decode(whole.response_ids[: end + 1])) for end in range(len(whole.response_ids))]
        end = next(end for end in range(1, len(texts)) if texts[end][-2:].isascii())
        stop = texts[end][-2:]
        cut = (await collect(engine.submit([make_request(0, max_new_tokens=40, stop=[stop])])))[0]
    assert cut.response_ids.tolist() == whole.response_ids[: end + 1].tolist()
    assert cut.finish_reason == FinishReason.STOP


async def test_the_seed_decides_the_tokens(engine: Engine) -> None:
    requests = [make_request(i, group_id=0, max_new_tokens=10) for i in range(3)]
    async with asyncio.timeout(LIMIT_S):
        first = await collect(engine.submit(requests))
        again = {i: s for request in requests for i, s in (await collect(engine.submit([request]))).items()}
    assert same_tokens(first, again)


@pytest.mark.parametrize(
    "sampling", [{"top_k": 2**31 - 1}, {"top_p": 1e-6}, {"min_p": 1 - 1e-16}, {"temperature": 1e6}]
)
async def test_the_ends_of_what_sampling_takes_are_served(
    config: EngineConfig, engine: Engine, sampling: dict[str, Any]
) -> None:
    if isinstance(config, VllmEngineConfig) and "temperature" in sampling:
        sampling = {"temperature": 2.0}
    async with asyncio.timeout(LIMIT_S):
        samples = await collect(engine.submit([make_request(0, ignore_eos=True, **sampling)]))
    assert len(samples[0].response_ids) == 8


async def test_the_samples_of_a_group_differ(engine: Engine) -> None:
    requests = [make_request(i, group_id=0, max_new_tokens=10, ignore_eos=True) for i in range(8)]
    async with asyncio.timeout(LIMIT_S):
        samples = await collect(engine.submit(requests))
    assert len({tuple(sample.response_ids) for sample in samples.values()}) == 8


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.5, "top_k": 5},
        {"temperature": 0.8, "top_p": 0.7},
        {"temperature": 1.2, "top_k": 20, "top_p": 0.6},
        {"temperature": 1.0, "min_p": 0.2},
    ],
    ids=str,
)
async def test_log_probs_are_of_the_distribution_that_was_sampled_from(
    config: EngineConfig, engine: Engine, model: PreTrainedModel, sampling: Mapping[str, Any]
) -> None:
    needs_model(config)
    requests = [make_request(i, max_new_tokens=12, **sampling) for i in range(4)]
    async with asyncio.timeout(LIMIT_S):
        samples = await collect(engine.submit(requests))
    got = np.concatenate([samples[i].rollout_log_probs for i in range(4)])
    assert agree(
        config, got, np.concatenate([log_probs_by_transformers(model, r, samples[r.request_id]) for r in requests])
    )


async def test_greedy_requests_get_the_most_likely_tokens_beside_sampled_ones(
    config: EngineConfig, engine: Engine, model: PreTrainedModel
) -> None:
    needs_model(config)
    greedy, *sampled = [make_request(i, max_new_tokens=12, temperature=float(i > 0), ignore_eos=True) for i in range(3)]
    async with asyncio.timeout(LIMIT_S):
        sample = (await collect(engine.submit([*sampled, greedy])))[0]
    assert agree(config, sample.rollout_log_probs, log_probs_by_transformers(model, greedy, sample))
    alone = make_request(0, top_k=1)  # leaves nothing but the most likely token, with a log-probability of 0
    assert agree(config, log_probs_by_transformers(model, alone, sample), np.zeros(12, np.float32))


async def test_prompts_with_more_tokens_than_a_step_takes_are_computed_in_turn(
    config: EngineConfig, engine: Engine, model: PreTrainedModel
) -> None:
    needs_model(config)
    requests = [make_request(i, prompt=500, max_new_tokens=2) for i in range(8)]
    async with asyncio.timeout(LIMIT_S):
        samples = await collect(engine.submit(requests))
    for request in requests:
        sample = samples[request.request_id]
        assert agree(config, sample.rollout_log_probs, log_probs_by_transformers(model, request, sample))


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
        before = engine.stats()
        stream = engine.submit([make_request(0, max_new_tokens=5)])
        for _ in range(20):
            await asyncio.sleep(0)
        assert engine.stats().steps == before.steps
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


async def test_abort_in_mid_generation_keeps_the_tokens_made_so_far(config: EngineConfig, engine: Engine) -> None:
    needs_steps(config)
    request = make_request(0, max_new_tokens=300, ignore_eos=True)
    async with asyncio.timeout(LIMIT_S):
        whole = (await collect(engine.submit([request])))[0]
        stream = engine.submit([request])
        await made_tokens(engine, 3)
        await engine.abort([0])
        cut = (await collect(stream))[0]
    assert cut.finish_reason == FinishReason.ABORT
    assert 3 <= len(cut.response_ids) < 300
    assert cut.response_ids.tolist() == whole.response_ids[: len(cut.response_ids)].tolist()
    assert len(cut.response_ids) == len(cut.rollout_log_probs) == len(cut.weight_versions)


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


@pytest.mark.parametrize("token", [-1, 2**40])
async def test_prompts_outside_of_the_vocabulary_are_refused(config: EngineConfig, engine: Engine, token: int) -> None:
    needs_model(config)
    with pytest.raises(RequestError, match="outside the vocabulary"):
        engine.submit([replace(make_request(0), prompt_ids=np.array([7, token]))])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_ids", np.array([5.0, 6.0])),
        ("prompt_ids", np.array([True, False])),
        ("prompt_ids", np.array([[5, 6]])),
        ("prompt_ids", [5, 6]),
        ("prompt_ids", torch.tensor([5, 6])),
        ("priority", None),
        ("priority", float("nan")),
        ("seed", 0.5),
        ("seed", None),
    ],
    ids=str,
)
async def test_fields_of_another_type_are_refused(engine: Engine, field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"request 1 has .*{field.removesuffix('_ids')}"):
        engine.submit([make_request(0), replace(make_request(1), **{field: value})])
    assert engine.stats().waiting == 0


async def test_numbers_of_numpy_do_as_well_and_belong_to_the_caller(engine: Engine) -> None:
    request = make_request(0, ignore_eos=True)
    expected = await collect(engine.submit([request]))
    numbers: dict[str, Any] = {"seed": np.int64(request.seed), "priority": np.float32(0.5)}
    numbers["prompt_ids"] = prompt = request.prompt_ids.astype(np.int32)
    stream = engine.submit([replace(request, **numbers)])
    prompt[:] = 5
    assert same_tokens(await collect(stream), expected)


async def test_tokens_carry_the_version_of_their_weights(engine: Engine, model: PreTrainedModel) -> None:
    old = engine.stats().version
    async with asyncio.timeout(LIMIT_S):
        before = await collect(engine.submit([make_request(0)]))
        await engine.update_weights(old + 7, ((name, tensor) for name, tensor in model.state_dict().items()))
        after = await collect(engine.submit([make_request(0)]))
    assert set(before[0].weight_versions) == {old}
    assert set(after[0].weight_versions) == {old + 7}
    assert same_tokens(before, after)
    assert engine.stats().version == old + 7


async def test_an_update_in_mid_generation_shows_in_the_versions_from_then_on(
    config: EngineConfig, engine: Engine, model: PreTrainedModel
) -> None:
    needs_steps(config)
    old = engine.stats().version
    async with asyncio.timeout(LIMIT_S):
        stream = engine.submit([make_request(i, max_new_tokens=300, ignore_eos=True) for i in range(2)])
        await made_tokens(engine, 6)
        await engine.pause_generation()
        await engine.update_weights(old + 1, model.state_dict().items())
        await engine.resume_generation()
        samples = await collect(stream)
    for sample in samples.values():
        assert len(sample.response_ids) == 300
        assert sorted(sample.weight_versions) == sample.weight_versions.tolist()
        assert set(sample.weight_versions) == {old, old + 1}


async def test_new_weights_make_the_tokens_that_follow(
    config: EngineConfig, engine: Engine, model: PreTrainedModel
) -> None:
    needs_model(config)
    request = make_request(0, prompt=300, max_new_tokens=12)  # long enough for cached blocks, which must not be found
    torch.manual_seed(0)
    changed = {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        changed["lm_head.weight"] = changed["model.embed_tokens.weight"]
    oracle = copy.deepcopy(model)
    oracle.load_state_dict(changed)
    version = engine.stats().version
    async with asyncio.timeout(LIMIT_S):
        await collect(engine.submit([request]))
        await engine.update_weights(version + 1, changed.items())
        after = (await collect(engine.submit([request])))[0]
        await engine.update_weights(version + 2, model.state_dict().items())
        restored = (await collect(engine.submit([request])))[0]
    assert agree(config, after.rollout_log_probs, log_probs_by_transformers(oracle, request, after))
    assert agree(config, restored.rollout_log_probs, log_probs_by_transformers(model, request, restored))


async def test_weights_that_break_off_leave_the_old_ones(engine: Engine, model: PreTrainedModel) -> None:
    def breaking_off() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in list(model.state_dict().items())[:-1]:
            yield name, tensor * 2
        raise ConnectionError("the sender died")

    version = engine.stats().version
    async with asyncio.timeout(LIMIT_S):
        before = await collect(engine.submit([make_request(0)]))
        with pytest.raises(ConnectionError, match="the sender died"):
            await engine.update_weights(version + 1, breaking_off())
        after = await collect(engine.submit([make_request(0)]))
    assert before[0].rollout_log_probs.tolist() == after[0].rollout_log_probs.tolist()
    assert set(after[0].weight_versions) == {version}
    assert engine.stats().version == version


async def test_wrong_weights_leave_the_old_ones(config: EngineConfig, engine: Engine, model: PreTrainedModel) -> None:
    needs_model(config)
    doubled = {name: tensor * 2 for name, tensor in model.state_dict().items()}
    name = "model.norm.weight"
    version = engine.stats().version
    async with asyncio.timeout(LIMIT_S):
        before = await collect(engine.submit([make_request(0)]))
        for wrong in (
            {key: tensor for key, tensor in doubled.items() if key != name},
            doubled | {"model.nrom.weight": doubled[name]},
            doubled | {name: doubled[name][:3]},
        ):
            with pytest.raises(EngineError, match=r"model\.(norm|nrom)\.weight"):
                await engine.update_weights(version + 1, iter(wrong.items()))
        after = await collect(engine.submit([make_request(0)]))
    assert same_tokens(before, after)
    assert before[0].rollout_log_probs.tolist() == after[0].rollout_log_probs.tolist()
    assert set(after[0].weight_versions) == {version}


async def test_a_closed_engine_tells_its_streams(engine: Engine) -> None:  # the last test: it ends the shared engine
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
