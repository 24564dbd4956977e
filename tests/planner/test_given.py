"""Claims on a recipe as it is: which engines and trainer it has."""

from dataclasses import replace

import pytest

from tailrace.errors import PlanError
from tailrace.planner.candidates import Candidates
from tailrace.planner.given import given, with_allocation
from tailrace.planner.modes import USUAL, Mode
from tailrace.planner.problem import Problem
from tailrace.planner.trial import bases_of, config_of, planned, scenario_for
from tailrace.planning.allocation import Allocation
from tailrace.simulator.run import SimulatedRun
from tailrace.simulator.summary import Summing
from tests.planner.problems import problem_of

SEPARATED = ("pipeline.placement=separated", "queue.type=service", "sampling.max_new_tokens=65536")


def allocated(cluster: str, *recipe: str, model: str = "Qwen2.5-1.5B") -> Allocation:
    return given(problem_of(cluster, *SEPARATED, *recipe, model=model)).allocation


@pytest.mark.parametrize(
    ("cluster", "recipe", "said"),
    [
        ("2xH20+2xH800", ("cluster.rollout.workers=3",), "3 engines of 1 devices take 3 of 2 H20; change"),
        ("8xH100", ("engine={type: native, kv_cache_gib: 99}",), "engine.kv_cache_gib is 99, and H100 has room for 6"),
        (
            "8xH100",
            ("cluster.rollout.pools.wide.engine.kv_cache_gib=0.01",),
            "raise cluster.rollout.pools.wide.engine.kv_cache_gib",
        ),
        (
            "2xH100",
            ("algorithm.kl.coefficient=0.1", "cluster.reference.workers=1"),
            "1 workers of the reference, of 1 H100 each, leave none for the trainer",
        ),
        (
            "2xH20+2xH800",
            ("pipeline.placement=colocated",),
            "the cluster has pools of H20 and H800; give a cluster of one",
        ),
    ],
)
def test_too_few_devices_and_too_little_memory_are_refused(cluster: str, recipe: tuple[str, ...], said: str) -> None:
    with pytest.raises(PlanError) as refused:
        allocated(cluster, *recipe)
    assert said in str(refused.value)


def test_an_engine_that_does_not_fit_is_refused() -> None:
    with pytest.raises(
        PlanError, match=r"an engine of Qwen2\.5-72B with TP 1 does not fit on H100; raise its TP degree"
    ):
        allocated("8xH100", model="Qwen2.5-72B")


def test_the_reference_has_devices_that_the_trainer_does_not_have() -> None:
    found = allocated("8xH100", "algorithm.kl.coefficient=0.1", "cluster.reference.workers=2")
    assert found.reference is not None
    assert found.reference.dp == 2
    assert found.layout.devices == 5
    assert found.devices == 8


def sequential(*recipe: str) -> Problem:
    return problem_of("8xH100", *SEPARATED, "trainer.micro_batch_tokens=16384", *recipe)


@pytest.mark.parametrize("kl", ["algorithm.kl.coefficient=0", "algorithm.kl.coefficient=0.1"])
@pytest.mark.parametrize("mode", USUAL[1:], ids=str)
def test_a_recipe_has_the_parts_of_the_same_plan_and_so_its_interval(mode: Mode, kl: str) -> None:
    problem = problem_of("4xH100", *SEPARATED, *(f"pipeline.{key}={value}" for key, value in mode.values.items()), kl)
    for one in Candidates(problem).of(mode):
        recipe = config_of(problem.config, one)
        assert with_allocation(replace(problem, config=recipe), one.allocation).parts == one.parts


def test_the_interval_covers_engines_trainer_and_weights() -> None:
    problem = sequential("cluster.rollout.workers=4")
    candidate = given(problem)
    bases = bases_of(problem, candidate)
    engines, trainer = bases.engines.error, bases.trainer.error
    assert trainer < engines < bases.weights.error
    summing = Summing(0)
    SimulatedRun(scenario_for(problem, candidate, 1), problem.drawn, sinks=(summing,)).run()
    shorter, longer = planned(problem, candidate, summing.summary(preemptions=0)).spread
    assert 1 + trainer < longer
    assert shorter < 1 / (1 + trainer)
