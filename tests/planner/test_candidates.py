"""Claims on the allocations that are tried."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.planner.candidates import Candidates, sizes
from tailrace.planner.modes import USUAL, Mode, modes_of
from tailrace.planning.hardware.clusters import open_cluster
from tailrace.planning.memory import CONTEXT_BYTES, engine_memory
from tests.planner.problems import config_of, problem_of

MODELS = ("Qwen2.5-0.5B", "Qwen2.5-7B", "Qwen2.5-32B")


@given(
    cluster=st.sampled_from(["2xH100", "16xH100", "8xH20+8xH800", "4xA40", "16xA100"]),
    model=st.sampled_from(MODELS),
    mode=st.sampled_from(USUAL),
    kl=st.sampled_from(["algorithm.kl.coefficient=0", "algorithm.kl.coefficient=0.1"]),
)
@settings(max_examples=30)
def test_every_candidate_fits_on_the_devices_and_in_their_memory(cluster: str, model: str, mode: Mode, kl: str) -> None:
    problem = problem_of(cluster, kl, model=model)
    for candidate in Candidates(problem).of(mode):
        allocation, engines = candidate.allocation, candidate.engines
        assert engines.devices <= engines.pool.devices
        assert allocation.trainer_devices <= allocation.trainer.devices
        if engines.pool is allocation.trainer:
            assert allocation.devices <= engines.pool.devices
        assert engines.tp * engines.dp <= engines.pool.per_node
        assert (allocation.reference is not None) == kl.endswith("0.1")
        engine = engine_memory(
            problem.shape, tp=engines.tp, cache_tokens=engines.cache_tokens, step_tokens=8192, batch_size=256
        )
        room = engines.pool.device.memory_bytes - CONTEXT_BYTES
        if mode.colocated:
            reference = allocation.reference
            weights = 0.0 if reference is None else 2 * problem.setup(reference).parameters
            assert engine.peak + candidate.trainer.peak + weights <= room
        assert engine.peak <= room
        assert candidate.trainer.fits(allocation.trainer.device)
        assert engines.cache_tokens >= problem.load.batches.longest
        assert candidate.bound.seconds > 0


def test_there_are_few_numbers_of_devices_and_all_of_a_smaller_pool_are_among_those_of_a_larger_one() -> None:
    small, large = open_cluster("64xH100").pools[0], open_cluster("1024xH100").pools[0]
    assert set(sizes(small, 64)) <= set(sizes(large, 1024))
    assert sizes(small, 8) == list(range(1, 9))
    assert {1, 8, 12, 16, 64} <= set(sizes(small, 64))
    assert len(sizes(large, 1024)) < 70


def test_two_pools_may_each_have_either_work() -> None:
    space = Candidates(problem_of("8xH20+8xH800", model="Qwen2.5-7B"))
    found = space.of(Mode(placement="separated", streaming=True))
    pairs = {(one.engines.pool.kind, one.allocation.trainer.kind) for one in found}
    assert pairs == {("H20", "H20"), ("H20", "H800"), ("H800", "H20"), ("H800", "H800")}


def test_a_mode_that_the_recipe_gives_is_kept_unless_told_otherwise() -> None:
    given_mode = config_of("pipeline.placement=separated", "queue.type=service", "pipeline.max_staleness=3")
    own = Mode(placement="separated", max_staleness=3)
    assert modes_of(given_mode, search=False) == (own,)
    assert modes_of(given_mode, search=True) == (own, *USUAL)
    assert modes_of(config_of(), search=False) == USUAL


@pytest.mark.parametrize("mode", USUAL)
def test_more_engines_never_generate_for_longer(mode: Mode) -> None:
    found = Candidates(problem_of("8xH100")).of(mode)
    same: dict[object, list[tuple[int, float]]] = {}
    for one in found:
        key = one.allocation.layout, one.micro_batch_tokens, one.engines.tp, one.engines.cache_tokens
        same.setdefault(key, []).append((one.engines.devices, one.bound.generation_s))
    for each in same.values():
        seconds = [second for _, second in sorted(each)]
        assert all(later <= earlier for earlier, later in pairwise(seconds))
