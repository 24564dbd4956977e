"""Claims on the best plans."""

import pickle
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tailrace.planner import Mode, Problem, plan
from tailrace.planner.candidates import Candidates
from tailrace.planner.modes import USUAL
from tailrace.planner.problem import Table
from tailrace.planner.processes import one_by_one, side_by_side
from tailrace.planner.search import front
from tailrace.planner.trial import Objective, Plan, simulate
from tailrace.planning.allocation import Allocation
from tailrace.planning.hardware.clusters import open_cluster
from tailrace.simulator.scenario import Remaking
from tests.planner.problems import PPO, problem_of

CLUSTER = """
pools:
  near: {{device: H20, nodes: 1, datacentre: here}}
  far: {{device: H800, nodes: 1, datacentre: there}}
links:
  - {{between: [here, there], gb_s: {gb_s}, ms: 10}}
"""


SERVICE = "queue.type=service"


def everything(problem: Problem) -> list[Plan]:
    space = Candidates(problem)
    return [simulate(problem, candidate) for mode in USUAL for candidate in space.of(mode)]


@pytest.fixture(scope="module")
def small() -> Problem:
    return problem_of("4xH100")


@pytest.fixture(scope="module")
def all_plans(small: Problem) -> list[Plan]:
    return everything(small)


@pytest.mark.parametrize("objective", ["time", "cost", "energy"])
def test_the_search_finds_what_simulating_everything_finds(
    small: Problem, all_plans: list[Plan], objective: Objective
) -> None:
    best = min(one.value(objective) for one in all_plans)
    found = plan(small, objective=objective)
    assert found.enumerated == len(all_plans)
    assert len(found.plans) == 24
    assert found.best.value(objective) <= 1.03 * best


def every_split(problem: Problem, mode: Mode) -> list[float]:
    """Seconds of a step under every split of the devices among engines, trainer and critic, whatever the planner leaves
    out."""
    space, (pool,) = Candidates(problem), problem.cluster.pools
    assert space.critic is not None
    return [
        simulate(problem, space.of_allocation(mode, allocation, training.micro_batch_tokens, 1)).step_s
        for trains in range(1, pool.devices - 1)
        for gives in range(1, pool.devices - trains)
        for training in space.trainer.quickest(pool, trains, streaming=mode.streaming)
        for critic in space.critic.alike(pool, gives, training)
        for engines in space.engines(pool.name, pool.devices - trains - gives)
        for allocation in [Allocation(rollout=(engines,), trainer=pool, layout=training.layout, critic=critic.layout)]
    ]


@pytest.mark.parametrize("mode", [Mode(placement="separated"), Mode(placement="separated", max_staleness=1)], ids=str)
def test_with_a_critic_the_search_finds_what_every_split_of_the_devices_finds(mode: Mode) -> None:
    problem = problem_of("4xH100", PPO, *(f"pipeline.{key}={value}" for key, value in mode.values.items()), SERVICE)
    found = plan(problem)
    assert found.best.step_s <= 1.03 * min(every_split(problem, mode))
    allocation = found.best.allocation
    assert allocation.critic is not None
    assert allocation.devices == allocation.rollout_devices + allocation.layout.devices + allocation.critic.devices
    assert found.best.bound.critic_s > 0


def test_the_best_of_each_mode_is_simulated(small: Problem) -> None:
    assert {one.mode for one in plan(small, candidates=4).plans} == set(USUAL)


def test_of_fewer_candidates_than_modes_the_most_promising_are_simulated(small: Problem) -> None:
    space = Candidates(small)
    bounds = {mode: min(one.bound.seconds for one in space.of(mode)) for mode in USUAL}
    assert plan(small, candidates=1).best.mode == min(USUAL, key=lambda mode: bounds[mode])


def test_a_pool_that_is_called_after_a_part_of_a_run_is_for_that_alone(tmp_path: Path) -> None:
    path = tmp_path / "pinned.yaml"
    path.write_text("pools: {trainer: {device: H100, nodes: 1}, others: {device: H20, nodes: 1}}")
    problem = problem_of(open_cluster(str(path)), model="Qwen2.5-1.5B")
    found = [one for mode in USUAL for one in Candidates(problem).of(mode)]
    assert {(one.engines.pool.name, one.allocation.trainer.name) for one in found} == {("others", "trainer")}
    assert not Candidates(problem).fits(Mode(placement="colocated"))


def test_the_same_problem_has_the_same_plans(small: Problem) -> None:
    one, other = (plan(small, candidates=5) for _ in range(2))
    assert [each.step_s for each in one.plans] == [each.step_s for each in other.plans]


def test_more_devices_have_no_slower_best_plan() -> None:
    seconds = [plan(problem_of(f"{devices}xH100")).best.step_s for devices in (1, 2, 4, 8)]
    assert all(later <= earlier for earlier, later in pairwise(seconds))


def test_a_faster_link_has_no_slower_best_plan(tmp_path: Path) -> None:
    seconds = []
    for gb_s in (0.5, 5, 50):
        path = tmp_path / f"{gb_s}.yaml"
        path.write_text(CLUSTER.format(gb_s=gb_s))
        problem = problem_of(open_cluster(str(path)), "pipeline.placement=separated", "queue.type=service")
        space = Candidates(problem)
        found = [
            one
            for one in space.of(Mode(placement="separated"))
            if (one.engines.pool.name, one.allocation.trainer.name) == ("near", "far")
        ]
        best = min(found, key=lambda one: one.bound.seconds)
        seconds.append(simulate(problem, best).step_s)
    assert seconds[0] > seconds[1] > seconds[2]


def test_where_cost_counts_fewer_devices_may_win(small: Problem) -> None:
    quick, cheap = plan(small), plan(small, objective="cost")
    assert cheap.best.usd_per_1000_steps <= quick.best.usd_per_1000_steps
    assert cheap.best.allocation.devices <= quick.best.allocation.devices


def test_on_the_front_no_plan_is_both_faster_and_cheaper_than_another(all_plans: list[Plan]) -> None:
    found = front(all_plans)
    assert all(a.step_s < b.step_s and a.usd_per_1000_steps > b.usd_per_1000_steps for a, b in pairwise(found))
    for one in all_plans:
        assert any(other.step_s <= one.step_s and other.usd_per_1000_steps <= one.usd_per_1000_steps for other in found)


def test_what_would_make_it_faster_is_simulated() -> None:
    found = plan(problem_of("8xH100", "pipeline.placement=separated", "queue.type=service"))
    changes = {gain.change: gain.plan for gain in found.gains}
    assert any("for generation" in change for change in changes)
    assert any("for training" in change for change in changes)
    assert changes["staleness + 1"].mode == replace(found.best.mode, max_staleness=1)
    assert changes["staleness + 1"].step_s < found.best.step_s


def test_a_penalty_has_a_reference_with_devices_of_its_own() -> None:
    given = ("algorithm.kl.coefficient=0.1", "pipeline.placement=separated", "queue.type=service")
    best = plan(problem_of("8xH100", *given), candidates=4).best
    assert best.allocation.reference is not None
    assert best.allocation.devices == best.allocation.rollout_devices + best.allocation.trainer_devices
    assert best.allocation.trainer_devices == best.allocation.layout.devices + best.allocation.reference.devices
    assert best.bound.reference_s <= best.bound.training_s


def test_trials_side_by_side_have_the_same_plans(small: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.planner.processes._WORTH", 0)
    problem = replace(small, times=None, _sources={})
    trials = [(problem, candidate) for candidate in Candidates(problem).of(USUAL[1])[:3]]
    with side_by_side(problem) as simulate_all:
        apart = simulate_all(trials)
    assert [one.step_s for one in apart] == [one.step_s for one in one_by_one(trials)]


def test_the_interval_holds_what_other_draws_of_the_workload_take(small: Problem) -> None:
    best = plan(small, candidates=4).best
    low, high = best.interval_s
    for seed in range(1, 9):
        other = problem_of("4xH100", f"seed={seed}")
        found = Candidates(other).placed(best.mode, best.allocation, best.candidate.micro_batch_tokens)
        assert found is not None
        assert low <= simulate(other, found).step_s <= high


def test_memory_suffices_for_the_longest_sample_that_the_recipe_allows() -> None:
    short, long = (
        problem_of("4xH100", f"sampling.max_new_tokens={most}", model="Qwen2.5-7B") for most in (8192, 65_536)
    )
    assert short.drawn.groups == long.drawn.groups
    assert long.load.batches.longest == long.drawn.longest_prompt + 65_536
    found = [min(one.trainer.peak for one in Candidates(problem).of(USUAL[1])) for problem in (short, long)]
    assert found[0] < found[1]
    engines = [one.engines for mode in USUAL for one in Candidates(long).of(mode)]
    assert all(one.cache_tokens >= long.load.batches.longest for one in engines)


def test_a_problem_whose_algorithm_remakes_groups_goes_to_other_processes() -> None:
    problem = replace(problem_of("4xH100", "algorithm={type: dapo, group_size: 4}"), times=None)
    own = replace(problem.table, remaking=Remaking(decide=lambda rows: True, most=1))  # no function of a module
    problem.__dict__["table"] = own
    there: Problem = pickle.loads(pickle.dumps(problem))
    assert there.table.remaking == Table.of(problem.config).remaking is not None
    assert there.drawn.groups == problem.drawn.groups
