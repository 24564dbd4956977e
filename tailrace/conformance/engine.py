"""The contract of every engine, as tests."""

import asyncio
import copy
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tailrace.config.engine import EngineConfig
from tailrace.conformance.requests import collect, cut_off, make_request, same_tokens
from tailrace.conformance.tiny import write_tiny_model
from tailrace.engine.base import Engine, EngineArgs
from tailrace.engine.factory import make_engine
from tailrace.errors import EngineError, RequestError
from tailrace.registers.phases import PARTS, PURPOSES
from tailrace.types import FinishReason, FloatArray, Request, Sample

LIMIT_S = 240


@pytest.mark.asyncio(loop_scope="class")
class EngineContract:
    """Subclass it and set `config`. Every test is a promise of `tailrace.engine.base.Engine`.

    The engine is made once and serves all tests, since some take seconds to start. So tests count from what they find,
    and the last one closes it.
    """

    config: ClassVar[EngineConfig]
    """The section `engine` of the engine under test, as in a recipe."""
    device: ClassVar[str] = "cpu"
    tolerance: ClassVar[float] = 1e-4
    """The difference of a log-probability from transformers in fp32 that is allowed; about 0.1 in bfloat16."""
    outliers: ClassVar[float] = 0.0
    """The share of tokens that may differ by more: in bfloat16 a few are beyond a truncation's edge."""
    highest_temperature: ClassVar[float] = 1e6
    """The highest temperature that the engine takes."""
    whole_responses: ClassVar[bool] = False
    """Whether a step makes a whole response, so that nothing can be asked for in its midst."""
    without_model: ClassVar[bool] = False
    """Whether the engine plays scripts: it has neither weights nor a tokenizer then."""

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The directory of the served model: a tiny random Llama, unless a subclass overrides this fixture."""
        return write_tiny_model("llama", tmp_path_factory.mktemp("tiny"), head_dim=32)

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, model_dir: Path) -> PreTrainedModel:
        """The oracle: the model in transformers."""
        oracle: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        return oracle

    @pytest.fixture(scope="class")
    @classmethod
    def executor(cls) -> Iterator[ThreadPoolExecutor]:
        """The executor, which stands for the device."""
        with ThreadPoolExecutor(max_workers=1) as executor:
            yield executor

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def engine(cls, executor: ThreadPoolExecutor, model_dir: Path) -> AsyncIterator[Engine]:
        """The engine under test."""
        engine = make_engine(cls.config, EngineArgs(model_dir=model_dir, device=cls.device, executor=executor))
        yield engine
        await engine.close()

    def needs_model(self) -> None:
        """Skip the test where the engine has no model."""
        if self.without_model:
            pytest.skip("this engine has no model")

    def needs_steps(self) -> None:
        """Skip the test where a step makes a whole response."""
        if self.whole_responses:
            pytest.skip("this engine makes a whole response in one step")

    def agree(self, got: FloatArray, expected: FloatArray) -> bool:
        """Whether log-probabilities are equal, up to rounding."""
        return bool((np.abs(got - expected) > self.tolerance).mean() <= self.outliers)

    def check_same(self, sample: Sample, whole: Sample) -> None:
        """Check that two responses are the same, up to rounding, which may choose another token and all that follow."""
        if not self.outliers:
            assert sample.response_ids.tolist() == whole.response_ids.tolist()
            assert self.agree(sample.rollout_log_probs, whole.rollout_log_probs)

    async def whole_and_cut(
        self, engine: Engine, request: Request, end: Callable[[Collection[int]], Awaitable[None]]
    ) -> tuple[Sample, Sample]:
        """The response to a request, and what there is of it when `end` is called in its midst."""
        self.needs_steps()
        whole = (await collect(engine.submit([request])))[request.request_id]
        stream = engine.submit([request])
        await made_tokens(engine, 3)
        await end([request.request_id, 99])
        cut = (await collect(stream))[request.request_id]
        assert cut.finish_reason == FinishReason.ABORT
        return whole, cut

    async def test_every_request_gets_one_sample_with_aligned_arrays(self, engine: Engine) -> None:
        """`submit` yields a sample for each request, whose arrays have one entry a token."""
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

    async def test_ignoring_stops_gives_exactly_the_tokens_asked_for(self, engine: Engine) -> None:
        """A response with `ignore_eos` has `max_new_tokens` tokens."""
        requests = [make_request(i, group_id=0, max_new_tokens=i + 1, ignore_eos=True) for i in range(6)]
        async with asyncio.timeout(LIMIT_S):
            samples = await collect(engine.submit(requests))
        assert [len(samples[i].response_ids) for i in range(6)] == [1, 2, 3, 4, 5, 6]
        assert {sample.finish_reason for sample in samples.values()} == {FinishReason.LENGTH}

    async def test_a_response_ends_where_the_context_does(self, engine: Engine) -> None:
        """Prompt and response have `max_model_len` tokens at most."""
        prompt = engine.max_model_len - 3
        async with asyncio.timeout(LIMIT_S):
            sample = (await collect(engine.submit([make_request(0, prompt=prompt, ignore_eos=True)])))[0]
        assert (len(sample.response_ids), sample.finish_reason) == (3, FinishReason.LENGTH)

    async def test_a_stop_token_ends_a_response_and_is_kept(self, engine: Engine) -> None:
        """`stop_token_ids` end a response, as its last token."""
        self.needs_model()
        async with asyncio.timeout(LIMIT_S):
            whole = (await collect(engine.submit([make_request(0, max_new_tokens=12, ignore_eos=True)])))[0]
            stop = int(whole.response_ids[4])
            cut = (await collect(engine.submit([make_request(0, max_new_tokens=12, stop_token_ids=[stop])])))[0]
        expected = whole.response_ids[: whole.response_ids.tolist().index(stop) + 1]
        assert cut.response_ids.tolist() == expected.tolist()
        assert cut.finish_reason == FinishReason.STOP

    async def test_a_stop_string_ends_a_response_with_the_token_that_completes_it(
        self, engine: Engine, model_dir: Path
    ) -> None:
        """`stop` strings end a response; nothing of it is cut off."""
        self.needs_model()
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        async with asyncio.timeout(LIMIT_S):
            whole = (await collect(engine.submit([make_request(0, max_new_tokens=40)])))[0]
            texts = [str(tokenizer.decode(whole.response_ids[: end + 1])) for end in range(len(whole.response_ids))]
            stop = next(text[-2:] for text in texts[1:] if text[-2:].isascii())
            end = next(end for end, text in enumerate(texts) if stop in text)
            cut = (await collect(engine.submit([make_request(0, max_new_tokens=40, stop=[stop])])))[0]
        assert cut.response_ids.tolist() == whole.response_ids[: end + 1].tolist()
        assert cut.finish_reason == FinishReason.STOP

    async def test_the_seed_decides_the_tokens(self, engine: Engine) -> None:
        """Equal seeds give equal tokens, whatever else is in the batch."""
        requests = [make_request(i, group_id=0, max_new_tokens=10) for i in range(3)]
        async with asyncio.timeout(LIMIT_S):
            first = await collect(engine.submit(requests))
            again = {i: s for request in requests for i, s in (await collect(engine.submit([request]))).items()}
        assert same_tokens(first, again)

    @pytest.mark.parametrize(
        "sampling", [{"top_k": 2**31 - 1}, {"top_p": 1e-6}, {"min_p": 1 - 1e-16}, {"temperature": 1e6}]
    )
    async def test_the_ends_of_what_sampling_takes_are_served(self, engine: Engine, sampling: dict[str, Any]) -> None:
        """The extreme values of `SamplingConfig` are served."""
        if "temperature" in sampling:
            sampling = {"temperature": min(sampling["temperature"], self.highest_temperature)}
        async with asyncio.timeout(LIMIT_S):
            samples = await collect(engine.submit([make_request(0, ignore_eos=True, **sampling)]))
        assert len(samples[0].response_ids) == 8

    async def test_the_samples_of_a_group_differ(self, engine: Engine) -> None:
        """Requests of one group draw tokens of their own."""
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
        self, engine: Engine, model: PreTrainedModel, sampling: Mapping[str, Any]
    ) -> None:
        """`rollout_log_probs` are those after temperature, top-k, top-p and min-p."""
        self.needs_model()
        requests = [make_request(i, max_new_tokens=12, **sampling) for i in range(4)]
        async with asyncio.timeout(LIMIT_S):
            samples = await collect(engine.submit(requests))
        got = np.concatenate([samples[i].rollout_log_probs for i in range(4)])
        assert self.agree(
            got, np.concatenate([log_probs_by_transformers(model, r, samples[r.request_id]) for r in requests])
        )

    async def test_greedy_requests_get_the_most_likely_tokens_beside_sampled_ones(
        self, engine: Engine, model: PreTrainedModel
    ) -> None:
        """Temperature 0 takes the most likely token, beside other requests."""
        self.needs_model()
        greedy, *sampled = [
            make_request(i, max_new_tokens=12, temperature=float(i > 0), ignore_eos=True) for i in range(3)
        ]
        async with asyncio.timeout(LIMIT_S):
            sample = (await collect(engine.submit([*sampled, greedy])))[0]
        assert self.agree(sample.rollout_log_probs, log_probs_by_transformers(model, greedy, sample))
        alone = make_request(0, top_k=1)  # leaves nothing but the most likely token, with a log-probability of 0
        assert self.agree(log_probs_by_transformers(model, alone, sample), np.zeros(12, np.float32))

    async def test_prompts_with_more_tokens_than_a_step_takes_are_computed_in_turn(
        self, engine: Engine, model: PreTrainedModel
    ) -> None:
        """Long prompts are cut over several steps, with equal results."""
        self.needs_model()
        requests = [make_request(i, prompt=500, max_new_tokens=2) for i in range(8)]
        async with asyncio.timeout(LIMIT_S):
            samples = await collect(engine.submit(requests))
        for request in requests:
            sample = samples[request.request_id]
            assert self.agree(sample.rollout_log_probs, log_probs_by_transformers(model, request, sample))

    async def test_streams_end_by_themselves_and_do_not_mix(self, engine: Engine) -> None:
        """Each stream of `submit` has the samples of its own requests."""
        streams = [engine.submit([make_request(10 * i + j) for j in range(3)]) for i in range(3)]
        async with asyncio.timeout(LIMIT_S):
            samples = await asyncio.gather(*map(collect, streams))
        assert [sorted(ids) for ids in samples] == [[0, 1, 2], [10, 11, 12], [20, 21, 22]]

    async def test_what_it_tells_of_time_and_memory_has_names_of_the_register(self, engine: Engine) -> None:
        """`take_seconds` and `memory` use the names of `tailrace.registers.phases`, and no figure is negative."""
        await collect(engine.submit([make_request(0)]))
        seconds, memory = engine.take_seconds(), engine.memory()
        assert seconds.keys() <= PARTS["generation"].keys()
        assert memory.keys() <= PURPOSES.keys()
        assert all(figure >= 0 for figure in (*seconds.values(), *memory.values()))

    async def test_nothing_is_a_stream_that_ends_at_once(self, engine: Engine) -> None:
        """`submit` of no request yields nothing."""
        assert await collect(engine.submit([])) == {}

    async def test_paused_engines_make_nothing_and_go_on_when_resumed(self, engine: Engine) -> None:
        """`pause` stops all tokens until `resume`."""
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

    async def test_a_pause_holds_between_two_steps(self, engine: Engine) -> None:
        """`pause` returns when no step is under way."""
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

    async def test_abort_finishes_requests_with_what_they_have(self, engine: Engine) -> None:
        """`abort` ends requests with FinishReason.ABORT."""
        async with asyncio.timeout(LIMIT_S):
            await engine.pause_generation()
            stream = engine.submit([make_request(i, max_new_tokens=5, ignore_eos=True) for i in range(3)])
            await engine.abort([1, 99])
            aborted = await anext(stream)
            assert (aborted.request_id, aborted.finish_reason) == (1, FinishReason.ABORT)
            assert len(aborted.response_ids) == len(aborted.rollout_log_probs) == 0
            await engine.resume_generation()
            assert sorted(await collect(stream)) == [0, 2]

    async def test_abort_in_mid_generation_keeps_the_tokens_made_so_far(self, engine: Engine) -> None:
        """An aborted sample has the tokens that were made."""
        request = make_request(0, max_new_tokens=300, ignore_eos=True)
        async with asyncio.timeout(LIMIT_S):
            whole, cut = await self.whole_and_cut(engine, request, engine.abort)
        assert 3 <= len(cut.response_ids) < 300
        assert cut.response_ids.tolist() == whole.response_ids[: len(cut.response_ids)].tolist()
        assert len(cut.response_ids) == len(cut.rollout_log_probs) == len(cut.weight_versions)

    async def test_a_response_that_was_begun_elsewhere_goes_on(self, engine: Engine) -> None:
        """`begun` stays as it is. With equal weights and an equal seed the rest is what it would have been.

        An engine that starts all responses anew refuses it.
        """
        whole_request = make_request(0, max_new_tokens=16, ignore_eos=True)
        async with asyncio.timeout(LIMIT_S):
            whole = (await collect(engine.submit([whole_request])))[0]
            if not engine.continues:
                with pytest.raises(RequestError, match="begun"):
                    engine.submit([replace(whole_request, begun=cut_off(whole, 1))])
                return
            for tokens in (1, 9, 15):
                begun = cut_off(whole, tokens)
                sample = (await collect(engine.submit([replace(whole_request, begun=begun)])))[0]
                assert sample.response_ids[:tokens].tolist() == begun.response_ids.tolist()
                assert sample.rollout_log_probs[:tokens].tolist() == begun.rollout_log_probs.tolist()
                assert (len(sample.response_ids), sample.finish_reason) == (16, FinishReason.LENGTH)
                self.check_same(sample, whole)

    async def test_a_withdrawn_response_goes_on_with_its_cache(self, engine: Engine) -> None:
        """`withdraw` is `abort`; with a `cache_form`, the sample of what runs has the keys and values of its tokens."""
        request = make_request(0, max_new_tokens=300, ignore_eos=True)
        async with asyncio.timeout(LIMIT_S):
            whole, cut = await self.whole_and_cut(engine, request, engine.withdraw)
            if engine.cache_form is None:
                assert cut.cache is None
                return
            assert cut.cache is not None
            assert (cut.cache.form, cut.cache.version) == (engine.cache_form, engine.stats().version)
            assert cut.cache.tokens == len(request.prompt_ids) + len(cut.response_ids) - 1
            sample = (await collect(engine.submit([replace(request, begun=cut)])))[0]
        assert sample.cache is None
        assert (len(sample.response_ids), sample.finish_reason) == (300, FinishReason.LENGTH)
        self.check_same(sample, whole)

    async def test_closing_a_stream_aborts_its_requests(self, engine: Engine) -> None:
        """A stream of `submit` that is closed leaves nothing in the engine."""
        async with asyncio.timeout(LIMIT_S):
            stream = engine.submit([make_request(i, max_new_tokens=4 + 300 * i, ignore_eos=True) for i in range(2)])
            async with aclosing(stream):
                assert (await anext(stream)).request_id == 0
            assert [sample async for sample in stream] == []
            assert (engine.stats().running, engine.stats().waiting) == (0, 0)
            again = await collect(engine.submit([make_request(1, max_new_tokens=2, ignore_eos=True)]))
            assert len(again[1].response_ids) == 2

    async def test_request_ids_in_flight_are_refused(self, engine: Engine) -> None:
        """`submit` refuses a request_id that is in flight."""
        async with asyncio.timeout(LIMIT_S):
            stream = engine.submit([make_request(0)])
            with pytest.raises(RequestError, match=r"\b0\b"):
                engine.submit([make_request(1), make_request(0)])
            with pytest.raises(RequestError, match=r"\b5\b"):
                engine.submit([make_request(5), make_request(5)])
            assert list(await collect(stream)) == [0]
            assert list(await collect(engine.submit([make_request(1), make_request(0)]))) in ([0, 1], [1, 0])

    async def test_bad_prompts_are_refused_before_any_is_accepted(self, engine: Engine) -> None:
        """`submit` accepts all of its requests or none."""
        for tokens in (0, engine.max_model_len):
            with pytest.raises(RequestError, match=r"\b1\b"):
                engine.submit([make_request(0), make_request(1, prompt=tokens)])
            assert engine.stats().waiting == 0

    @pytest.mark.parametrize("token", [-1, 2**40])
    async def test_prompts_outside_of_the_vocabulary_are_refused(self, engine: Engine, token: int) -> None:
        """`submit` refuses tokens that the model does not have."""
        self.needs_model()
        with pytest.raises(RequestError, match="vocabulary"):
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
    async def test_fields_of_another_type_are_refused(self, engine: Engine, field: str, value: Any) -> None:
        """`submit` refuses a field of the wrong type, by its name."""
        with pytest.raises(RequestError, match=rf"\b1\b.*{field.removesuffix('_ids')}"):
            engine.submit([make_request(0), replace(make_request(1), **{field: value})])
        assert engine.stats().waiting == 0

    async def test_numbers_of_numpy_do_as_well_and_belong_to_the_caller(self, engine: Engine) -> None:
        """NumPy integers are taken, and arrays are copied."""
        request = make_request(0, ignore_eos=True)
        expected = await collect(engine.submit([request]))
        numbers: dict[str, Any] = {"seed": np.int64(request.seed), "priority": np.float32(0.5)}
        numbers["prompt_ids"] = prompt = request.prompt_ids.astype(np.int32)
        stream = engine.submit([replace(request, **numbers)])
        prompt[:] = 5
        assert same_tokens(await collect(stream), expected)

    async def test_tokens_carry_the_version_of_their_weights(self, engine: Engine, model: PreTrainedModel) -> None:
        """`weight_versions` are those that `update_weights` was given."""
        old = engine.stats().version
        async with asyncio.timeout(LIMIT_S):
            before = await collect(engine.submit([make_request(0)]))
            await engine.update_weights(old + 7, ((name, tensor) for name, tensor in parameters(model).items()))
            after = await collect(engine.submit([make_request(0)]))
        assert set(before[0].weight_versions) == {old}
        assert set(after[0].weight_versions) == {old + 7}
        assert same_tokens(before, after)
        assert engine.stats().version == old + 7

    async def test_an_update_in_mid_generation_shows_in_the_versions_from_then_on(
        self, engine: Engine, model: PreTrainedModel
    ) -> None:
        """Tokens after `update_weights` have the new version."""
        self.needs_steps()
        old = engine.stats().version
        requests = [make_request(i, max_new_tokens=300, ignore_eos=True) for i in range(2)]
        async with asyncio.timeout(LIMIT_S):
            samples = await updated_in_mid_generation(engine, requests, parameters(model))
        for sample in samples.values():
            assert len(sample.response_ids) == 300
            assert sorted(sample.weight_versions) == sample.weight_versions.tolist()
            assert set(sample.weight_versions) == {old, old + 1}

    async def test_an_update_in_mid_generation_makes_the_tokens_from_then_on(
        self, engine: Engine, model: PreTrainedModel
    ) -> None:
        """Tokens after `update_weights` are those of the new weights."""
        self.needs_model()
        self.needs_steps()
        greedy, sampled = [make_request(i, max_new_tokens=300, temperature=float(i), ignore_eos=True) for i in range(2)]
        oracle = changed(model, beyond_caches(model))
        version = engine.stats().version
        async with asyncio.timeout(LIMIT_S):
            samples = await updated_in_mid_generation(engine, [greedy, sampled], parameters(oracle))
            await engine.update_weights(version + 2, parameters(model).items())

        def expected(request: Request) -> FloatArray:
            sample = samples[request.request_id]
            before, after = (log_probs_by_transformers(weights, request, sample) for weights in (model, oracle))
            return np.where(sample.weight_versions == version, before, after)

        for request in (greedy, sampled):
            assert self.agree(samples[request.request_id].rollout_log_probs, expected(request))
        alone = make_request(0, top_k=1)  # leaves nothing but the most likely token, with a log-probability of 0
        assert self.agree(expected(alone), np.zeros(300, np.float32))

    async def test_new_weights_make_the_tokens_that_follow(self, engine: Engine, model: PreTrainedModel) -> None:
        """`update_weights` changes what a request gets."""
        self.needs_model()
        request = make_request(
            0, prompt=300, max_new_tokens=12
        )  # long enough for cached blocks, which must not be found
        oracle = changed(model, parameters(model))
        version = engine.stats().version
        async with asyncio.timeout(LIMIT_S):
            await collect(engine.submit([request]))
            await engine.update_weights(version + 1, parameters(oracle).items())
            after = (await collect(engine.submit([request])))[0]
            await engine.update_weights(version + 2, parameters(model).items())
            restored = (await collect(engine.submit([request])))[0]
        assert self.agree(after.rollout_log_probs, log_probs_by_transformers(oracle, request, after))
        assert self.agree(restored.rollout_log_probs, log_probs_by_transformers(model, request, restored))

    async def test_weights_that_break_off_leave_the_old_ones(self, engine: Engine, model: PreTrainedModel) -> None:
        """`update_weights` installs all tensors or none."""

        def breaking_off() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in list(parameters(model).items())[:-1]:
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

    async def test_wrong_weights_leave_the_old_ones(self, engine: Engine, model: PreTrainedModel) -> None:
        """`update_weights` refuses a missing, unknown or misshapen tensor."""
        self.needs_model()
        doubled = {name: tensor * 2 for name, tensor in parameters(model).items()}
        name = next(name for name, tensor in doubled.items() if tensor.dim() == 1)
        misspelled = f"{name}_"
        version = engine.stats().version
        async with asyncio.timeout(LIMIT_S):
            before = await collect(engine.submit([make_request(0)]))
            for wrong, told in (
                ({key: tensor for key, tensor in doubled.items() if key != name}, name),
                (doubled | {misspelled: doubled[name]}, misspelled),
                (doubled | {name: doubled[name][:3]}, name),
            ):
                with pytest.raises(EngineError, match=re.escape(told)):
                    await engine.update_weights(version + 1, iter(wrong.items()))
            after = await collect(engine.submit([make_request(0)]))
        assert same_tokens(before, after)
        assert before[0].rollout_log_probs.tolist() == after[0].rollout_log_probs.tolist()
        assert set(after[0].weight_versions) == {version}

    async def test_a_closed_engine_tells_its_streams(
        self, engine: Engine
    ) -> None:  # the last test: it ends the shared engine
        """`close` ends every stream with an EngineError."""
        async with asyncio.timeout(LIMIT_S):
            stream = engine.submit([make_request(0, max_new_tokens=200, ignore_eos=True)])
            waiting = asyncio.create_task(collect(stream))
            await asyncio.sleep(0)
            await engine.close()
            await engine.close()
            with pytest.raises(EngineError):
                await waiting
            with pytest.raises(EngineError):
                await collect(engine.submit([make_request(1)]))


async def made_tokens(engine: Engine, count: int) -> None:
    """Return once `engine` has made `count` more tokens."""
    target = engine.stats().generated_tokens + count
    while engine.stats().generated_tokens < target:
        await asyncio.sleep(0.001)  # the engine's thread would have to ask a loop that never rests for every operation


async def updated_in_mid_generation(
    engine: Engine, requests: Sequence[Request], weights: Mapping[str, torch.Tensor]
) -> dict[int, Sample]:
    """Return the samples of `requests`. From some token on, `weights` are used as the next version."""
    stream = engine.submit(requests)
    await made_tokens(engine, 6)
    await engine.pause_generation()
    await engine.update_weights(engine.stats().version + 1, weights.items())
    await engine.resume_generation()
    return await collect(stream)


def parameters(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights as a trainer gives them: under their HF names, tied ones once."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def changed(model: PreTrainedModel, names: Collection[str]) -> PreTrainedModel:
    """Copy the model, and change these parameters."""
    torch.manual_seed(0)
    copied = copy.deepcopy(model)
    for name, tensor in parameters(copied).items():
        if name in names:
            tensor += 0.05 * torch.randn_like(tensor)
    return copied


def beyond_caches(model: PreTrainedModel) -> list[str]:
    """The parameters that no key or value depends on, such as the final norm: when they change, a cache stays right."""
    cache = model(torch.tensor([[5, 6, 7]]), use_cache=True).past_key_values
    kept = torch.stack([tensor.sum() for layer in cache.layers for tensor in (layer.keys, layer.values)])
    names, tensors = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(kept.sum(), tensors, allow_unused=True)
    return [name for name, gradient in zip(names, gradients, strict=True) if gradient is None]


def log_probs_by_transformers(model: PreTrainedModel, request: Request, sample: Sample) -> FloatArray:
    """Log-probabilities of the response's tokens under the distributions that they were to be sampled from, [R]."""
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
