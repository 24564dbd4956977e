"""Claims on the allocations that are tried."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.planner.candidates import Candidates
from tailrace.planner.modes import USUAL, Mode, modes_of
from tailrace.planner.trainings import sizes
from tailrace.planning.hardware.clusters import open_cluster
from tailrace.planning.memory import CONTEXT_BYTES, engine_memory
from tailrace.planning.step_times.training_setup import Layout
from tests.planner.problems import PPO, config_of, problem_of

MODELS = ("Qwen2.5-0.5B", "Qwen2.5-7B", "Qwen2.5-32B")


@given(
    cluster=st.sampled_from(["2xH100", "16xH100", "8xH20+8xH800", "4xA40", "16xA100"]),
    model=st.sampled_from(MODELS),
    mode=st.sampled_from(USUAL),
    kl=st.sampled_from(["algorithm.kl.coefficient=0", "algorithm.kl.coefficient=0.1"]),
    ppo=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_every_candidate_fits_on_the_devices_and_in_their_memory(
    cluster: str, model: str, mode: Mode, kl: str, ppo: bool
) -> None:
    problem = problem_of(cluster, *([PPO] if ppo else []), kl, model=model)
    for candidate in Candidates(problem).of(mode):
        allocation, engines = candidate.allocation, candidate.engines
        assert engines.devices <= engines.pool.devices
        assert allocation.trainer_devices <= allocation.trainer.devices
        if engines.pool is allocation.trainer:
            assert allocation.devices <= engines.pool.devices
        assert engines.tp * engines.dp <= engines.pool.per_node
        assert (allocation.reference is not None) == kl.endswith("0.1")
        assert (allocation.critic is not None) == (candidate.critic is not None) == ppo
        engine = engine_memory(
            problem.shape, tp=engines.tp, cache_tokens=engines.cache_tokens, step_tokens=8192, batch_size=256
        )
        room = engines.pool.device.memory_bytes - CONTEXT_BYTES
        if mode.colocated:
            reference = allocation.reference
            weights = 0.0 if reference is None else 2 * problem.setup(reference).parameters
            held = 0.0 if candidate.critic is None else sum(candidate.critic.held.values())
            assert engine.peak + candidate.trainer.peak + held + weights <= room
        assert engine.peak <= room
        assert candidate.trainer.fits(allocation.trainer.device)
        assert candidate.critic is None or candidate.critic.fits(allocation.trainer.device)
        assert engines.cache_tokens >= problem.load.batches.longest
        assert candidate.bound.seconds > 0


def test_a_critic_has_the_fewest_devices_with_which_the_trainer_does_not_wait_for_it() -> None:
    """Two numbers for each trainer: without the values of a step, and with them."""
    mode = Mode(placement="separated", streaming=True, max_staleness=1)
    found = Candidates(problem_of("16xH100", PPO)).of(mode)
    tried: dict[tuple[Layout, int], set[Layout]] = {}
    for one in found:
        assert one.allocation.critic is not None
        tried.setdefault((one.allocation.layout, one.micro_batch_tokens), set()).add(one.allocation.critic)
        if one.allocation.layout.devices < 4:
            assert one.parts.critic_s <= one.parts.training_s + one.parts.optimizer_s
    assert all(len(critics) <= 2 for critics in tried.values())
    with_values = [one for one in found if one.bound.critic_s <= one.bound.training_s]
    assert 0 < len(with_values) < len(found)


def test_a_colocated_critic_is_arranged_like_the_trainer_and_has_no_devices_of_its_own() -> None:
    for one in Candidates(problem_of("4xH100", PPO)).of(Mode(placement="colocated")):
        assert one.allocation.critic == one.allocation.layout
        assert one.allocation.devices == one.allocation.layout.devices


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
