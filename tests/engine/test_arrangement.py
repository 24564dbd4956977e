"""Engines whose ranks are rearranged while they generate, against an engine of one rank that stays as it is."""

import errno
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tailrace.config.engine import NativeEngineConfig
from tailrace.conformance.requests import make_request
from tailrace.conformance.tiny import write_tiny_model
from tailrace.engine import arrangement
from tailrace.engine.arrangement import Arrangement
from tailrace.engine.core import EngineCore
from tailrace.engine.lane import Lane
from tailrace.engine.ranks.process import ProcessReplica
from tailrace.engine.ranks.switch import SwitchRefused
from tailrace.engine.scheduling.scheduler import Scheduler
from tailrace.engine.scheduling.transplant import Transplant
from tailrace.errors import ModelError
from tailrace.models.architecture import read_architecture
from tailrace.types import Request, Sample
from tests.engine.helpers import TINY_GIB, make_core, run_core
from tests.engine.switching import Cache, is_alive, make_switching_core, pids, responses, steps, switch, wander
from tests.helpers.effort import effort

TIGHT: dict[str, Any] = {"kv_cache_gib": 14 * 4 * TINY_GIB["llama"], "prefill_tokens": 5, "max_batch_size": 5}
"""Settings with few blocks and chunked prompts. Two replicas that become one have half the places for sequences."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model("llama", tmp_path_factory.mktemp("switched") / "llama", seed=0)


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[EngineCore]:
    """A core of two ranks with room for everything."""
    with closing(make_switching_core(model, dp=2)) as core:
        yield core


@pytest.fixture(scope="module")
def tight_pair(model: Path) -> Iterator[EngineCore]:
    with closing(make_switching_core(model, tp=2, **TIGHT)) as core:
        yield core


def assert_same(samples: dict[int, Sample], reference: dict[int, Sample]) -> None:
    for number, (tokens, log_probs) in responses(samples, reference).items():
        assert samples[number].response_ids.tolist() == tokens
        assert samples[number].rollout_log_probs.tolist() == pytest.approx(log_probs, abs=2e-5)


@pytest.mark.parametrize("seed", [0, 1])
def test_no_token_changes_over_many_switches_while_requests_come_and_leave(
    pair: EngineCore, model: Path, seed: int
) -> None:
    requests, samples = wander(pair, (1, 2), switches=effort(100, 25), seed=seed)
    assert_same(samples, run_core(make_core(model), requests))


def test_no_token_changes_where_sequences_give_way_and_prompts_are_computed_in_pieces(
    tight_pair: EngineCore, model: Path
) -> None:
    requests, samples = wander(tight_pair, (1, 2), switches=effort(150, 75), seed=2, backlog=20)
    assert tight_pair.stats().preemptions > 0
    assert_same(samples, run_core(make_core(model), requests))


def test_four_ranks_change_between_all_degrees(model: Path) -> None:
    with closing(make_switching_core(model, dp=2, tp=2, max_batch_size=6)) as core:
        started = pids(core)
        requests, samples = wander(core, (1, 2, 4), switches=40, seed=3)
        assert pids(core) == started, "the processes stay"
    assert_same(samples, run_core(make_core(model), requests))
    assert not any(map(is_alive, started))


def test_eight_ranks_change_between_all_degrees(tmp_path: Path) -> None:
    model = write_tiny_model("llama", tmp_path / "llama", query_heads=8)
    with closing(make_switching_core(model, dp=8, max_batch_size=6)) as core:
        requests, samples = wander(core, (1, 2, 4, 8), switches=effort(200, 16), seed=4, backlog=20)
    assert_same(samples, run_core(make_core(model), requests))


@pytest.mark.parametrize("cache", ["move", "recompute"])
def test_what_runs_on_eight_ranks_is_shared_out_evenly_whatever_groups_there_are(model: Path, cache: Cache) -> None:
    of_group = [group for group, members in enumerate([9, 1, 2, 3, 1, 2, 3, 3]) for _ in range(members)]
    requests = [
        make_request(number, group_id=group, prompt=5 + group, max_new_tokens=40, ignore_eos=True)
        for number, group in enumerate(of_group)
    ]
    with closing(make_switching_core(model, dp=8)) as core:
        for request in requests:
            core.add(request)
        samples = steps(core, 12)
        for tp in (2, 1, 4):
            while any(lane.scheduler.waiting for lane in core.lanes):  # what has not begun goes where its group is
                samples += steps(core, 1)
            samples += switch(core, tp, cache=cache)[0]
            shares = [lane.scheduler.running + lane.scheduler.waiting for lane in core.lanes]
            assert max(shares) - min(shares) <= 1
            samples += steps(core, 2)
        samples += run_core(core, []).values()
    assert_same({sample.request_id: sample for sample in samples}, run_core(make_core(model), requests))


@pytest.mark.parametrize(("on_update", "caches"), [("keep", ["move"]), ("recompute", ["move", "recompute"])])
def test_new_weights_in_between_are_those_of_an_engine_that_never_switches(
    model: Path, tmp_path: Path, on_update: str, caches: list[Cache]
) -> None:
    paths = [model, *(write_tiny_model("llama", tmp_path / str(seed), seed=seed) for seed in (1, 2))]
    weights = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict() for path in paths]
    requests = [make_request(number, max_new_tokens=14, ignore_eos=True) for number in range(6)]

    def run(core: EngineCore, cache: Cache | None) -> dict[int, Sample]:
        core.load_weights(0, weights[0].items())
        for request in requests:
            core.add(request)
        samples = []
        for number in range(1, 15):
            if cache is not None and number % 2:
                switch(core, 3 - core.arrangement.config.tp, cache=cache)
            if number % 5 == 0:
                core.load_weights(number // 5, weights[number // 5].items())
            samples += core.step() + core.settle()
        return {sample.request_id: sample for sample in samples}

    alone = run(make_core(model, cache_on_update=on_update), None)
    with closing(make_switching_core(model, dp=2, cache_on_update=on_update)) as core:
        switched = [run(core, cache) for cache in caches]
    for samples in switched:
        assert_same(samples, alone)
        assert all(s.weight_versions.tolist() == [0] * 4 + [1] * 5 + [2] * 5 for s in samples.values())


def test_requests_share_the_prompts_of_sequences_that_have_moved(pair: EngineCore) -> None:
    def request(number: int) -> Request:
        return make_request(number, group_id=777, prompt=21, max_new_tokens=30, ignore_eos=True)

    pair.add(request(0))
    steps(pair, 3)
    switch(pair, 3 - pair.arrangement.config.tp)
    shared = pair.stats().shared_tokens
    pair.add(request(1))
    run_core(pair, [])
    assert pair.stats().shared_tokens - shared == 20


@pytest.mark.parametrize("cache", ["move", "recompute"])
def test_whoever_counts_sequences_during_a_switch_sees_them_all(
    pair: EngineCore, monkeypatch: pytest.MonkeyPatch, cache: Cache
) -> None:
    """The counts are taken before and after each part of a switch that other threads may see."""
    for number in range(5):
        pair.add(make_request(number, max_new_tokens=20, ignore_eos=True))
    steps(pair, 3)
    pair.settle()
    seen: list[tuple[str, int]] = []

    def look(moment: str) -> None:
        stats, load = pair.stats(), pair.load()
        assert load.tp * load.replicas == 2
        assert load.cache_tokens == pair.arrangement.cache_tokens(load.tp)
        seen.append((moment, stats.running + stats.waiting))

    def watch(kind: type, name: str) -> None:
        method = getattr(kind, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            look(f"before {name}")
            result = method(*arguments, **named)
            look(f"after {name}")
            return result

        patch.setattr(kind, name, watched)

    with monkeypatch.context() as patch:
        watch(Transplant, "commit")
        watch(Scheduler, "resume" if cache == "move" else "give")
        watch(ProcessReplica, "release")
        watch(Lane, "__init__")
        watch(Arrangement, "_adopt")
        switch(pair, 3 - pair.arrangement.config.tp, cache=cache)
    assert {moment for moment, _ in seen} >= {"before commit", "after commit", "before _adopt", "after _adopt"}
    assert {count for _, count in seen} == {5}
    assert len(run_core(pair, [])) == 5


def test_a_switch_says_what_it_took_and_makes_groups_once(model: Path) -> None:
    with closing(make_switching_core(model, dp=2)) as core:
        core.add(make_request(0, prompt=21, max_new_tokens=30, ignore_eos=True))
        steps(core, 2)
        assert core.arrangement.groups == {1}
        _, first = switch(core, 2)
        _, second = switch(core, 1)
        _, third = switch(core, 2)
        assert core.arrangement.groups == {1, 2}
        assert [report.made_groups for report in (first, second, third)] == [(2,), (), ()]
        assert first.kv_bytes > 0
        assert first.total_s > first.groups_s + first.weights_s + first.kv_s
        assert len(run_core(core, [])[0].response_ids) == 30


def test_the_most_that_a_cache_held_is_known_after_a_switch(pair: EngineCore) -> None:
    run_core(pair, [])
    pair.memory()
    pair.add(make_request(0, prompt=21, max_new_tokens=30, ignore_eos=True))
    steps(pair, 2)
    pair.settle()
    pair.abort([0])
    switch(pair, 3 - pair.arrangement.config.tp)
    held, later = (pair.memory()["kv_cache_used"] for _ in range(2))
    assert held > later == 0


def test_where_no_directory_can_be_made_a_switch_is_refused_and_the_engine_goes_on(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def full(size: int) -> Iterator[None]:
        raise OSError(errno.ENOSPC, "No space left on device")
        yield

    with closing(make_switching_core(model, dp=2)) as core:
        core.add(make_request(0, prompt=21, max_new_tokens=30, ignore_eos=True))
        steps(core, 2)
        core.settle()
        with monkeypatch.context() as patch:
            patch.setattr("tailrace.engine.ranks.switch.rendezvous", full)
            with pytest.raises(SwitchRefused, match="No space left"):
                core.arrangement.switch(2, cache="move")
        assert core.arrangement.can_switch
        switch(core, 2)
        assert len(run_core(core, [])[0].response_ids) == 30


def test_a_request_has_to_fit_every_arrangement_that_may_come(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fewer heads of each token a rank holds, the more tokens it holds."""
    monkeypatch.setattr(arrangement, "make_replicas", lambda *_, **__: [])
    made = Arrangement(NativeEngineConfig(tp=2, dp=2), read_architecture(model), device=torch.device("cpu"))
    assert made.least_blocks((1, 2)) == made.least_blocks((1,)) < made.least_blocks(()) == made.least_blocks((2,))
    with pytest.raises(ModelError, match="tp 5 leaves ranks without a query head"):
        made.least_blocks((1, 5))
