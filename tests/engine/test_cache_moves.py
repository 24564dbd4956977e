"""A response that goes on in another engine with its keys and values: the same tokens, and nothing computed again."""

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.conformance.requests import make_request
from tailrace.engine.core import EngineCore
from tailrace.engine.driver import DrivenEngine
from tailrace.engine.kernels.build import VECTORS
from tailrace.engine.model.weights import Weights
from tailrace.host.cpu import cpu_flags
from tailrace.models.architecture import parameter_shapes
from tailrace.types import CacheForm, FinishReason, Request, Sample, SequenceCache
from tests.engine.helpers import TinyModel, make_core, run_core
from tests.engine.switching import make_switching_core, pids, steps, switch

Change = Callable[[SequenceCache], SequenceCache]


def asked(count: int = 4, size: int = 2, **sampling: Any) -> list[Request]:
    """Groups of `size`, of different lengths."""
    settings = {"max_new_tokens": 24, "ignore_eos": True, **sampling}
    return [make_request(i, group_id=i // size, prompt=9 + 6 * (i // size), **settings) for i in range(count)]


def withdrawn(core: EngineCore, requests: Sequence[Request], after: int) -> list[Request]:
    """The requests with what `core` has made of them after so many steps."""
    for request in requests:
        core.check(request)
        core.add(request)
    steps(core, after)
    core.settle()
    samples = core.withdraw([request.request_id for request in requests])
    assert not core.has_work
    assert core.stats().used_blocks == 0
    begun = {sample.request_id: sample for sample in samples}
    return [replace(request, begun=begun.get(request.request_id)) for request in requests]


def bits(samples: dict[int, Sample]) -> dict[int, tuple[list[int], bytes, FinishReason]]:
    return {
        i: (sample.response_ids.tolist(), sample.rollout_log_probs.tobytes(), sample.finish_reason)
        for i, sample in samples.items()
    }


def prefilled(core: EngineCore) -> int:
    return core.stats().prefilled_tokens


def moved(begun: Sequence[Request]) -> list[SequenceCache]:
    """The caches of the requests."""
    return [request.begun.cache for request in begun if request.begun is not None and request.begun.cache is not None]


def assert_same(got: dict[int, Sample], whole: dict[int, Sample]) -> None:
    """Tokens are equal; log-probabilities up to rounding, since sums depend on what is in a batch."""
    assert got.keys() == whole.keys()
    for i, sample in got.items():
        assert sample.response_ids.tolist() == whole[i].response_ids.tolist()
        np.testing.assert_allclose(sample.rollout_log_probs, whole[i].rollout_log_probs, atol=1e-5)


@pytest.mark.parametrize("after", [3, 9, 20])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_and_log_probs_are_bit_for_bit_those_of_a_response_that_stayed(
    tiny_model: TinyModel, after: int, temperature: float
) -> None:
    # without siblings: a prompt's last block may be computed twice, and come to be shared later where one stays
    requests = asked(size=1, temperature=temperature)
    with closing(make_core(tiny_model("llama"))) as stays, closing(make_core(tiny_model("llama"))) as one:
        whole, begun = run_core(stays, requests), withdrawn(one, requests, after)
        with closing(make_core(tiny_model("llama"))) as two:
            assert bits(run_core(two, begun)) == bits(whole)
            assert prefilled(two) == 0, "no token of a prompt is computed again"


@settings(max_examples=25)
@given(after=st.integers(0, 24), temperature=st.sampled_from([0.0, 1.0]), stagger=st.booleans())
def test_responses_that_move_at_any_time_become_what_they_would_have_been(
    cores: tuple[EngineCore, EngineCore], after: int, temperature: float, stagger: bool
) -> None:
    first, other = cores
    requests = asked(temperature=temperature)
    whole = run_core(first, requests)
    here = [request for request in withdrawn(first, requests, after) if request.begun is not None]
    assert_same(
        run_core(other, here, stagger=stagger), {request.request_id: whole[request.request_id] for request in here}
    )
    assert other.stats().used_blocks == 0


@pytest.fixture(scope="module")
def cores(tiny_model: TinyModel) -> Any:
    """The second has a small cache, so that it preempts."""
    small = make_core(tiny_model("llama"), kv_cache_gib=0.00004)
    with closing(make_core(tiny_model("llama"))) as first, closing(small):
        yield first, small


@pytest.fixture(scope="module")
def layouts(tiny_model: TinyModel) -> Any:
    made: dict[str, EngineCore] = {}

    def get(name: str, **layout: int) -> EngineCore:
        if name not in made:
            made[name] = make_core(tiny_model("llama"), threads_per_rank=1, **layout)
        return made[name]

    yield get
    for core in made.values():
        core.close()


LAYOUTS = {"one": {}, "two lanes": {"dp": 2}, "tp 2": {"tp": 2}}


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
def test_caches_fit_engines_of_other_degrees_and_lanes(layouts: Any, source: str, target: str) -> None:
    first, other = layouts(source, **LAYOUTS[source]), layouts(target, **LAYOUTS[target])
    requests = [replace(request, group_id=50 + i) for i, request in enumerate(asked())]
    whole = run_core(layouts("one"), requests)
    begun = withdrawn(first, requests, 9)
    assert len(moved(begun)) == len(requests)
    before = prefilled(other)
    samples = run_core(other, begun)
    assert prefilled(other) == before
    assert_same(samples, whole)


def test_a_move_to_two_ranks_is_bit_for_bit_a_switch_to_them(tiny_model: TinyModel) -> None:
    requests = asked(1)
    with closing(make_switching_core(tiny_model("llama"), dp=2, tp=1)) as core:
        for request in requests:
            core.add(request)
        steps(core, 12)
        finished, _ = switch(core, 2)
        assert not finished
        made = core.load().made
        switched = run_core(core, [])
    with closing(make_core(tiny_model("llama"))) as one, closing(make_core(tiny_model("llama"), tp=2)) as two:
        for request in requests:
            one.add(request)
        while one.load().made != made:
            one.step()
        begun = [replace(requests[sample.request_id], begun=sample) for sample in one.withdraw([0])]
        assert bits(run_core(two, begun)) == bits(switched)


@pytest.mark.skipif(not cpu_flags() >= set(VECTORS), reason="this CPU has no AVX2")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_kernels_in_cpp_go_on_bit_for_bit(tiny_model: TinyModel, dtype: str) -> None:
    config: dict[str, Any] = {"dtype": dtype, "kernels": "cpu", "block_size": 16}
    with (
        closing(make_core(tiny_model("llama"), **config)) as one,
        closing(make_core(tiny_model("llama"), **config)) as two,
    ):
        whole = run_core(one, asked())
        assert bits(run_core(two, withdrawn(one, asked(), 9))) == bits(whole)
        assert prefilled(two) == 0


def other_form(cache: SequenceCache) -> SequenceCache:
    return replace(cache, form=CacheForm(name="another", token_bytes=cache.form.token_bytes))


def short(cache: SequenceCache) -> SequenceCache:
    return replace(cache, data=cache.data[:, :, 1:])


def newer(cache: SequenceCache) -> SequenceCache:
    return replace(cache, version=1)


def of_all_tokens(cache: SequenceCache) -> SequenceCache:
    return replace(cache, tokens=cache.tokens + 1)


@pytest.mark.parametrize("change", [other_form, short, newer, of_all_tokens])
def test_a_cache_that_does_not_fit_is_computed_again(tiny_model: TinyModel, change: Change) -> None:
    """Its contents are garbage here, so a use of them would change tokens."""

    def spoilt(request: Request) -> Request:
        assert request.begun is not None
        assert request.begun.cache is not None
        cache = change(replace(request.begun.cache, data=np.full_like(request.begun.cache.data, 63)))
        return replace(request, begun=replace(request.begun, cache=cache))

    with closing(make_core(tiny_model("llama"))) as one, closing(make_core(tiny_model("llama"))) as two:
        whole = run_core(one, asked())
        samples = run_core(two, [spoilt(request) for request in withdrawn(one, asked(), 9)])
        assert {i: s.response_ids.tolist() for i, s in samples.items()} == {
            i: s.response_ids.tolist() for i, s in whole.items()
        }
        assert prefilled(two) > 0


@pytest.mark.parametrize("config", [{"block_size": 8}, {"dtype": "bfloat16", "kernels": "torch"}])
def test_engines_that_keep_caches_otherwise_have_other_forms(tiny_model: TinyModel, config: dict[str, Any]) -> None:
    with closing(make_core(tiny_model("llama"))) as one, closing(make_core(tiny_model("llama"), **config)) as two:
        assert one.cache_form != two.cache_form
        run_core(two, withdrawn(one, asked(), 9))
        assert prefilled(two) == 9 + 15


def fresh_weights(core: EngineCore) -> Weights:
    chance = torch.Generator().manual_seed(7)
    return [
        (name, torch.randn(shape, generator=chance) * 0.1)
        for name, shape in parameter_shapes(core._architecture).items()
    ]


def test_a_response_goes_on_over_new_weights_as_one_that_stayed(tiny_model: TinyModel) -> None:
    """The older keys and values are kept or computed again, as the engine does with its own."""
    for keeps in ("keep", "recompute"):
        with (
            closing(make_core(tiny_model("llama"), cache_on_update=keeps)) as stays,
            closing(make_core(tiny_model("llama"), cache_on_update=keeps)) as source,
            closing(make_core(tiny_model("llama"), cache_on_update=keeps)) as early,
            closing(make_core(tiny_model("llama"), cache_on_update=keeps)) as late,
        ):
            weights = fresh_weights(stays)
            for request in asked():
                stays.add(request)
            steps(stays, 9)
            stays.load_weights(1, weights)
            whole = run_core(stays, [])
            begun = withdrawn(source, asked(), 9)
            late.load_weights(1, weights)  # before the request comes
            assert bits(run_core(late, begun)) == bits(whole)
            for request in begun:  # while it waits
                early.add(request)
            early.load_weights(1, weights)
            assert bits(run_core(early, [])) == bits(whole)


def test_older_keys_and_values_are_found_by_nobody_else(tiny_model: TinyModel) -> None:
    with closing(make_core(tiny_model("llama"))) as one, closing(make_core(tiny_model("llama"))) as two:
        begun = withdrawn(one, asked(1), 9)
        two.load_weights(1, fresh_weights(two))
        alone = run_core(two, [make_request(9, group_id=0, prompt=9, max_new_tokens=8, ignore_eos=True)])
        two.load_weights(2, fresh_weights(two))
        again = [make_request(9, group_id=0, prompt=9, max_new_tokens=8, ignore_eos=True)]
        samples = run_core(two, [*begun, *again], stagger=True)
        assert_same({9: samples[9]}, alone)


def test_others_share_what_came(tiny_model: TinyModel) -> None:
    with closing(make_core(tiny_model("llama"))) as one, closing(make_core(tiny_model("llama"))) as two:
        requests = asked(2)
        whole = run_core(one, requests)
        (begun,) = withdrawn(one, requests[:1], 9)
        two.add(begun)
        two.step()
        assert_same(run_core(two, requests[1:]), whole)
        assert prefilled(two) == 1, "the last token of the second one's prompt"


def test_what_waits_gives_back_the_cache_that_it_came_with(tiny_model: TinyModel) -> None:
    with closing(make_core(tiny_model("llama"))) as one, closing(make_core(tiny_model("llama"))) as two:
        begun = withdrawn(one, asked(1), 9)
        two.add(begun[0])
        (sample,) = two.withdraw([0])
        (cache,) = moved(begun)
        assert sample.cache is not None
        assert sample.cache.data is cache.data
        two.add(begun[0])
        (sample,) = two.abort([0])
        assert sample.cache is None, "nobody asked for it"


def test_a_rank_that_dies_takes_its_caches_along_and_no_token(tiny_model: TinyModel) -> None:
    with closing(make_core(tiny_model("llama"))) as one, closing(make_core(tiny_model("llama"), tp=2)) as two:
        whole = run_core(one, asked())
        for request in asked():
            two.add(request)
        steps(two, 6)
        os.kill(pids(two)[1], signal.SIGKILL)
        begun = [replace(asked()[sample.request_id], begun=sample) for sample in two.withdraw(range(4))]
        assert not moved(begun)
        assert {i: s.response_ids.tolist() for i, s in run_core(two, begun).items()} == {
            i: s.response_ids.tolist() for i, s in whole.items()
        }


async def test_a_stream_of_a_withdrawn_response_ends_with_its_cache(tiny_model: TinyModel) -> None:
    with ThreadPoolExecutor(1) as executor:
        engine = DrivenEngine(make_core(tiny_model("llama"), dp=2), executor)
        async with asyncio.timeout(60):
            stream = engine.submit(asked(2, max_new_tokens=400))
            while engine.stats().generated_tokens < 10:
                await asyncio.sleep(0.001)
            await engine.withdraw([0, 1, 77])
            samples = [sample async for sample in stream]
            assert len(samples) == 2
            for sample in samples:
                assert sample.finish_reason is FinishReason.ABORT
                assert sample.cache is not None
                assert sample.cache.tokens == 9 + len(sample.response_ids) - 1
            await engine.close()
