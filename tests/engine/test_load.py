"""What an engine tells of its load: what it has room for, what its steps cost, and how far its responses are."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from tailrace.conformance.requests import make_request
from tailrace.engine.backends.fake import FakeEngine, RandomPlaywright
from tests.conftest import TinyModel
from tests.engine.helpers import TINY_GIB, make_core


@pytest.mark.parametrize("dp", [1, 2])
def test_an_engine_tells_how_far_its_responses_are_and_what_its_steps_cost(tiny_model: TinyModel, dp: int) -> None:
    gib = 400 * TINY_GIB["llama"]
    with closing(make_core(tiny_model("llama"), dp=dp, kv_cache_gib=gib, max_batch_size=3)) as core:
        load = core.load()
        assert (load.replicas, load.tp, load.slots, load.cache_tokens) == (dp, 1, 3, 400)
        assert load.costs is None, "nothing was measured"
        assert load.made == {}
        for number in range(4):
            core.add(make_request(number, group_id=number, prompt=9, max_new_tokens=30, ignore_eos=True))
        seen: dict[int, int] = {}
        while core.has_work:
            core.step()
            now = core.load().made
            assert all(made >= seen.get(number, 0) for number, made in now.items())
            seen |= now
        assert seen.keys() == set(range(4))
        assert core.load().made == {}
        assert max(seen.values()) > 20, "it is told while a response runs"
        costs = core.load().costs
        assert costs is not None
        assert costs.prefill_s(1, 1, 9) > 0
        assert costs.step_s(1, 3, 60, 1) > 0


def test_an_engine_without_steps_of_its_own_tells_nothing() -> None:
    with ThreadPoolExecutor(1) as executor:
        assert FakeEngine(executor=executor, playwright=RandomPlaywright(9)).load() is None
