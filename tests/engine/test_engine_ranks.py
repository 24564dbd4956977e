"""Engines of several worker processes: equal to an engine of one rank, and intact when a process dies."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tailrace.conformance.requests import collect, make_request, same_tokens
from tailrace.conformance.tiny import write_tiny_model
from tailrace.engine import lane
from tailrace.engine.core import EngineCore
from tailrace.engine.driver import DrivenEngine
from tailrace.engine.ranks import rank_process as worker_process
from tailrace.engine.ranks.rank_process import RankProcess
from tailrace.errors import ConfigError, EngineError, ModelError
from tailrace.types import Request, Sample
from tests.engine.helpers import TinyModel, make_core, run_core
from tests.engine.switching import is_alive, pids

LAYOUTS = {"tp2": {"tp": 2}, "dp2": {"dp": 2}, "dp2 x tp2": {"dp": 2, "tp": 2}}
LIMIT_S = 60

MakeCore = Callable[[str], EngineCore]


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model("llama", tmp_path_factory.mktemp("ranks") / "old", seed=0)


@pytest.fixture(scope="module")
def cores(old: Path) -> Iterator[MakeCore]:
    """Make a core of each layout once, when it is first asked for."""
    made: dict[str, EngineCore] = {}

    def get(layout: str) -> EngineCore:
        if layout not in made:
            made[layout] = make_core(old, threads_per_rank=1, **LAYOUTS[layout])
        return made[layout]

    yield get
    for core in made.values():
        core.close()


def mixed_requests() -> list[Request]:
    """Requests in groups that are greedy or sampled, with and without filters."""
    samplings = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 50}]
    return [
        make_request(i, group_id=i // 3, prompt=7 + 3 * (i // 3), max_new_tokens=12, **samplings[i // 3 % 3])
        for i in range(18)
    ]


def assert_equal(one: dict[int, Sample], other: dict[int, Sample]) -> None:
    assert same_tokens(one, other)
    for request_id, sample in one.items():
        np.testing.assert_allclose(sample.rollout_log_probs, other[request_id].rollout_log_probs, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_and_log_probs_are_the_same_on_any_layout(old: Path, cores: MakeCore, layout: str) -> None:
    alone = run_core(make_core(old), mixed_requests())
    assert_equal(alone, run_core(cores(layout), mixed_requests()))


def test_every_replica_takes_its_share(cores: MakeCore) -> None:
    core = cores("dp2")
    for number in range(8):
        core.add(make_request(number, max_new_tokens=5, ignore_eos=True))
    made = [0, 0]
    while core.has_work:
        core.step()
        for index, each in enumerate(core.lanes):
            made[index] += 0 if each.decoded is None else each.decoded.sequences
            each.decoded = None
    assert sum(made) >= 8 * 4, "the first token of each may come with the prompt"
    assert min(made) >= 8


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_time_and_the_memory_of_all_ranks_are_told(old: Path, cores: MakeCore, layout: str) -> None:
    core, alone = cores(layout), make_core(old).memory()
    core.take_seconds()
    fresh = [make_request(i, group_id=1000 + i, prompt=9, max_new_tokens=12) for i in range(6)]
    run_core(core, fresh)  # whose prompts no test before has left in the cache
    exchanged = {"communication"} if "tp2" in layout else set()
    assert core.take_seconds().keys() == {"prefill", "decode", "sampling", "scheduling"} | exchanged
    told = core.memory()
    copies, ranks = LAYOUTS[layout].get("dp", 1), core.arrangement.config.ranks
    assert copies * alone["weights"] <= told["weights"] < 1.2 * copies * alone["weights"], "norms are on each rank"
    assert told["kv_cache_used"] > 0
    assert told["kv_cache_used"] + told["kv_cache_free"] == ranks * alone["kv_cache_free"]


def test_settling_waits_for_every_replica_and_loses_no_sample(cores: MakeCore) -> None:
    core = cores("dp2")
    requests = [make_request(i, max_new_tokens=1, ignore_eos=True) for i in range(4)]
    for request in requests:
        core.add(request)
    samples = core.step() + core.settle()
    assert not any(lane.busy for lane in core.lanes)
    assert sorted(sample.request_id for sample in samples) == [0, 1, 2, 3]
    assert not core.has_work


@pytest.mark.parametrize("layout", ["tp2", "dp2"])
def test_a_killed_rank_is_replaced_and_no_token_changes(old: Path, cores: MakeCore, layout: str) -> None:
    core = cores(layout)
    requests = [make_request(i, group_id=i // 2, max_new_tokens=20, ignore_eos=True) for i in range(6)]
    for request in requests:
        core.add(request)
    samples = [sample for _ in range(6) for sample in core.step()]
    restarts, (first, second) = core.stats().restarts, pids(core)
    os.kill(second, signal.SIGKILL)
    while core.has_work:
        samples += core.step()
    assert core.stats().restarts == restarts + 1
    assert second not in pids(core)
    assert (first in pids(core)) == (layout == "dp2"), "the ranks of a replica go together, other replicas stay"
    assert_equal({sample.request_id: sample for sample in samples}, run_core(make_core(old), requests))


@pytest.mark.parametrize("recompute", [False, True])
def test_new_weights_reach_every_rank_in_the_middle(old: Path, tmp_path: Path, recompute: bool) -> None:
    new = write_tiny_model("llama", tmp_path / "new", seed=1)
    weights = AutoModelForCausalLM.from_pretrained(new, dtype=torch.float32).state_dict()
    requests = [make_request(i, group_id=i // 2, max_new_tokens=9, ignore_eos=True) for i in range(4)]

    def run(core: EngineCore) -> dict[int, Sample]:
        for request in requests:
            core.add(request)
        while core.stats().generated_tokens < 12:
            core.step()
        core.load_weights(1, weights.items())
        return run_core(core, [])

    settings = {"cache_on_update": "recompute" if recompute else "keep"}
    with closing(make_core(old, tp=2, threads_per_rank=1, **settings)) as core:
        samples = run(core)
        versions = [version for sample in samples.values() for version in sample.weight_versions]
        assert sorted(set(versions)) == [0, 1]
        assert_equal(samples, run(make_core(old, **settings)))
        os.kill(pids(core)[0], signal.SIGKILL)
        after = run_core(core, requests)
        assert core.stats().restarts == 1
        assert {version for sample in after.values() for version in sample.weight_versions} == {1}
        assert_equal(after, run_core(make_core(new), requests))


def test_ranks_that_keep_dying_end_the_engine(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "MAX_DEATHS", 1)
    with closing(make_core(old, tp=2, threads_per_rank=1)) as core:
        core.add(make_request(0, max_new_tokens=4))

        def step_of_killed_ranks() -> None:
            for pid in pids(core):
                os.kill(pid, signal.SIGKILL)
            core.step()

        step_of_killed_ranks()
        assert core.stats().restarts == 1
        with pytest.raises(EngineError, match=r"SIGKILL.*ranks died 2 times in a row without a step done"):
            step_of_killed_ranks()


async def test_closing_does_not_wait_for_a_rank_that_stands_still(old: Path) -> None:
    with ThreadPoolExecutor(max_workers=1) as executor:
        core = make_core(old, tp=2, threads_per_rank=1, step_timeout_s=2 * LIMIT_S)
        engine = DrivenEngine(core, executor)
        started = pids(core)
        os.kill(started[1], signal.SIGSTOP)
        stream = engine.submit([make_request(0)])
        async with asyncio.timeout(LIMIT_S):
            while not engine.stats().running:
                await asyncio.sleep(0)
            await engine.close()
            with pytest.raises(EngineError, match="the engine was closed"):
                await collect(stream)
    assert not any(map(is_alive, started))


def test_closing_leaves_no_process(old: Path) -> None:
    core = make_core(old, dp=2, threads_per_rank=1)
    started = pids(core)
    core.add(make_request(0))
    core.step()
    core.close()
    core.close()
    assert len(started) == 2
    assert not any(map(is_alive, started))


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"tp": 5}, ModelError, "tp 5 leaves ranks without a query head, the model has 4"),
        ({"dp": 2, "kv_cache_gib": 1e-9}, ConfigError, "kv_cache_gib 1e-09 holds no block"),
    ],
    ids=["a tp that leaves ranks without a head", "a cache without room for a block"],
)
def test_what_the_model_does_not_allow_is_refused_before_any_process_is_started(
    tiny_model: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    error: type[Exception],
    says: str,
) -> None:
    started: list[int] = []

    class Counted(RankProcess):
        def __init__(self, rank: int) -> None:
            started.append(rank)
            super().__init__(rank)

    monkeypatch.setattr(worker_process, "RankProcess", Counted)
    with pytest.raises(error, match=says):
        make_core(tiny_model("llama"), threads_per_rank=1, **settings)
    assert started == []
