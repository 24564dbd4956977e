"""Claims on a plan under another recipe, cluster or workload."""

from dataclasses import replace
from pathlib import Path

import pytest

from tailrace.config.overrides import override_values
from tailrace.planner import Mode, Plan, Problem, plan
from tailrace.planner.candidates import Candidates
from tailrace.planner.trial import simulate
from tailrace.planner.what_if import Comparison, what_if
from tailrace.planning.hardware.base import Cluster
from tailrace.planning.hardware.clusters import open_cluster
from tests.planner.problems import problem_of

AHEAD = ("pipeline.placement=separated", "pipeline.streaming=true", "queue.type=service")


@pytest.fixture(scope="module")
def best() -> Plan:
    problem = problem_of("8xH100", *AHEAD)
    found = Candidates(problem).of(Mode(placement="separated", streaming=True))
    return simulate(problem, min(found, key=lambda one: one.bound.seconds))


@pytest.fixture
def four_a_node(tmp_path: Path) -> Cluster:
    path = tmp_path / "cluster.yaml"
    path.write_text("pools: {all: {device: H100, nodes: 4, devices_per_node: 4}}")
    return open_cluster(str(path))


def compared(best: Plan, problem: Problem, *changes: str) -> Comparison:
    given = override_values(changes[0]) if changes else {}
    return what_if(best, problem, "changed", given, plan)


def plan_of(found: Comparison) -> Plan:
    assert found.plan is not None
    return found.plan


def test_the_same_problem_has_the_same_plan(best: Plan) -> None:
    same = compared(best, problem_of("8xH100", *AHEAD))
    assert not same.searched
    assert plan_of(same).step_s == best.step_s


def test_a_key_of_the_recipe_changes_and_the_devices_stay(best: Plan) -> None:
    change = "pipeline.max_staleness=1"
    ahead = compared(best, problem_of("8xH100", *AHEAD, change), change)
    assert not ahead.searched
    assert plan_of(ahead).allocation == best.allocation
    assert plan_of(ahead).mode.max_staleness == 1
    assert plan_of(ahead).step_s < best.step_s


def test_another_cluster_takes_the_same_arrangement(best: Plan) -> None:
    faster = compared(best, problem_of("8xH200", *AHEAD))
    assert not faster.searched
    assert plan_of(faster).candidate.engines.pool.kind == "H200"
    assert plan_of(faster).allocation.layout == best.allocation.layout
    assert plan_of(faster).step_s < best.step_s
    assert plan_of(faster).usd_per_1000_steps != best.usd_per_1000_steps


def test_with_several_other_pools_a_plan_is_made_anew(best: Plan) -> None:
    other = compared(best, problem_of("8xH20+8xH800", *AHEAD))
    assert other.searched
    assert {plan_of(other).candidate.engines.pool.kind, plan_of(other).allocation.trainer.kind} <= {"H20", "H800"}


def test_a_reference_that_has_no_room_beside_the_plan_is_planned_anew(best: Plan) -> None:
    all_of_them = best.allocation.devices
    penalized = compared(best, problem_of(f"{all_of_them}xH100", *AHEAD, "algorithm.kl.coefficient=0.1"))
    assert penalized.searched
    assert plan_of(penalized).allocation.devices <= all_of_them


def test_what_does_not_fit_any_more_is_planned_anew(best: Plan) -> None:
    smaller = compared(best, problem_of("2xH100", *AHEAD))
    assert smaller.searched
    assert plan_of(smaller).allocation.devices <= 2
    assert plan_of(smaller).step_s > best.step_s


def test_an_arrangement_that_does_not_divide_the_heads_is_planned_anew(best: Plan) -> None:
    four = replace(best.candidate.engines, tp=4)
    allocation = replace(best.allocation, rollout=(four,))
    plan = replace(best, candidate=replace(best.candidate, allocation=allocation))
    other = compared(plan, problem_of("8xH100", *AHEAD, model="Qwen2.5-0.5B"))  # 14 heads
    assert other.searched


def test_a_tp_group_or_an_engine_that_is_wider_than_a_node_is_planned_anew(best: Plan, four_a_node: Cluster) -> None:
    eight, two_fours = (replace(best.candidate.engines, engines=1, tp=tp, dp=8 // tp) for tp in (8, 4))
    for engines in (eight, two_fours):
        allocation = replace(best.allocation, rollout=(engines,))
        plan = replace(best, candidate=replace(best.candidate, allocation=allocation))
        same = compared(plan, problem_of("16xH100", *AHEAD, model="Qwen3-0.6B"))
        assert not same.searched
        other = compared(plan, problem_of(four_a_node, *AHEAD, model="Qwen3-0.6B"))
        assert other.searched
        assert plan_of(other).candidate.engines.tp <= 4


def test_other_processes_that_grade_count_in_responses_at_a_time(best: Plan) -> None:
    judge = "rewards={grader: {type: judge, model: m, url: 'http://localhost:1/v1', concurrency: 16}}"
    for workers in (8, 1):
        change = f"rewards.workers={workers}"
        found = plan_of(compared(best, problem_of("8xH100", *AHEAD, judge, change), change))
        assert found.candidate.graders == 16 * workers


def test_more_reward_workers_grade_more_responses_at_a_time(best: Plan) -> None:
    change = "cluster.reward.workers=4"
    found = plan_of(compared(best, problem_of("8xH100", *AHEAD, "rewards.workers=3", change), change))
    assert found.candidate.graders == 12


def test_where_nothing_fits_the_reason_is_told_and_the_plan_stays(best: Plan) -> None:
    large = compared(best, problem_of("8xH100", *AHEAD, model="Qwen2.5-72B"))
    assert large.plan is None
    assert "lacks" in large.why
