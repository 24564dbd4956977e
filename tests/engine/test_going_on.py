"""A response that one engine has begun goes on in another, token for token."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.conformance.requests import cut_off, make_request
from tailrace.engine.core import EngineCore
from tailrace.engine.driver import DrivenEngine
from tailrace.errors import RequestError
from tailrace.types import FinishReason, Request, Sample
from tests.conftest import TinyModel
from tests.engine.helpers import make_core, run_core


def requests(**sampling: Any) -> list[Request]:
    """Two groups of three, of different lengths."""
    return [
        make_request(i, group_id=i // 3, prompt=6 + 5 * (i // 3), max_new_tokens=5 + 4 * i, **sampling)
        for i in range(6)
    ]


def assert_same(got: Sample, whole: Sample) -> None:
    assert got.response_ids.tolist() == whole.response_ids.tolist()
    assert got.weight_versions.tolist() == whole.weight_versions.tolist()
    assert got.finish_reason == whole.finish_reason
    np.testing.assert_allclose(got.rollout_log_probs, whole.rollout_log_probs, atol=1e-5)


@pytest.fixture(scope="module")
def cores(tiny_model: TinyModel) -> Any:
    """Two engines of one model: the first with a small cache, so that it preempts, the second with two replicas."""
    small = make_core(tiny_model("llama"), kv_cache_gib=0.00004)
    with closing(small), closing(make_core(tiny_model("llama"), dp=2)) as other:
        yield small, other


@settings(max_examples=25)
@given(st.lists(st.integers(0, 24), min_size=6, max_size=6), st.sampled_from([0.0, 1.0]), st.booleans())
def test_responses_that_are_cut_anywhere_become_what_they_would_have_been(
    cores: tuple[EngineCore, EngineCore], cuts: list[int], temperature: float, stagger: bool
) -> None:
    first, other = cores
    asked = requests(temperature=temperature, ignore_eos=True)
    whole = run_core(first, asked)
    begun = [
        replace(request, begun=cut_off(whole[i], min(cut, len(whole[i].response_ids) - 1)))
        for i, (request, cut) in enumerate(zip(asked, cuts, strict=True))
    ]
    for core in (other, first):
        for i, sample in run_core(core, begun, stagger=stagger).items():
            assert_same(sample, whole[i])


def test_a_stop_string_is_found_across_the_cut(tiny_model: TinyModel) -> None:
    with closing(make_core(tiny_model("llama"))) as core:
        request = make_request(0, max_new_tokens=40, ignore_eos=False)
        whole = run_core(core, [request])[0]
        text = core._stop_rules._detokenize(whole.response_ids.tolist())
        stopping = replace(request, sampling=request.sampling.model_copy(update={"stop": [text[3:6]]}))
        stopped = run_core(core, [stopping])[0]
        assert stopped.finish_reason == FinishReason.STOP
        for tokens in range(len(stopped.response_ids)):
            assert_same(run_core(core, [replace(stopping, begun=cut_off(stopped, tokens))])[0], stopped)


def test_what_waits_is_given_back_as_it_came(tiny_model: TinyModel) -> None:
    with closing(make_core(tiny_model("llama"))) as core:
        request = make_request(0, max_new_tokens=12, ignore_eos=True)
        begun = cut_off(run_core(core, [request])[0], 5)
        core.add(replace(request, begun=begun))
        (sample,) = core.abort([0])
        assert_same(sample, begun)


def test_only_new_tokens_are_counted(tiny_model: TinyModel) -> None:
    with closing(make_core(tiny_model("llama"))) as core:
        request = make_request(0, max_new_tokens=12, ignore_eos=True)
        whole = run_core(core, [request])[0]
        run_core(core, [replace(request, begun=cut_off(whole, 5))])
        assert core.stats().generated_tokens == 12 + 7


def test_a_response_that_has_ended_does_not_go_on(tiny_model: TinyModel) -> None:
    with closing(make_core(tiny_model("llama"))) as core:
        request = make_request(7, max_new_tokens=12, ignore_eos=True)
        whole = run_core(core, [request])[7]
        with pytest.raises(
            RequestError, match="request 7 goes on with a response that has ended with its 12 tokens, by"
        ):
            core.check(replace(request, begun=whole))
        foreign = replace(cut_off(whole, 3), response_ids=np.array([5, 10**6, 7]))
        with pytest.raises(RequestError, match="request 7 has `begun` with a token outside the vocabulary"):
            core.check(replace(request, begun=foreign))


async def test_what_is_begun_has_one_log_probability_a_token(tiny_model: TinyModel) -> None:
    with ThreadPoolExecutor(1) as executor:
        core = make_core(tiny_model("llama"))
        engine = DrivenEngine(core, executor)
        request = make_request(3, max_new_tokens=12, ignore_eos=True)
        async with asyncio.timeout(60):
            (whole,) = [sample async for sample in engine.submit([request])]
            bad = replace(cut_off(whole, 5), rollout_log_probs=whole.rollout_log_probs[:4])
            with pytest.raises(RequestError, match=r"`begun` with arrays of the shapes \(5,\), \(4,\) and \(5,\)"):
                engine.submit([replace(request, begun=bad)])
            core.continues = engine.continues = False
            with pytest.raises(RequestError, match="request 3 has `begun`, and this engine starts all anew"):
                engine.submit([replace(request, begun=cut_off(whole, 5))])
            await engine.close()
