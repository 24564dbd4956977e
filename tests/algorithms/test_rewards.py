"""The tasks of several rewards stand in the place of an algorithm's grading."""

from pathlib import Path
from typing import Any

from tailrace.algorithms.factory import make_run_algorithm
from tailrace.algorithms.table import AddUp, Grade
from tailrace.config.run import RunConfig
from tailrace.run.queue import check_queue, run_table
from tailrace.run.workers.pools import run_pools
from tests.helpers.runs import small_run

EXACT = {"grader": {"type": "exact"}}


def config(rewards: dict[str, Any], **changes: Any) -> RunConfig:
    return small_run(Path("run"), Path("model"), Path("prompts.jsonl"), rewards=rewards, **changes)


def test_a_single_grader_has_one_task() -> None:
    assert [task.name for task in make_run_algorithm(config(EXACT)).tasks] == [
        "rollout",
        "reward",
        "advantage",
        "actor",
    ]


def test_each_reward_has_a_task_in_a_pool_of_its_own_and_the_sum_follows_row_by_row() -> None:
    run = config({"graders": {"a": EXACT, "b": EXACT}})
    rollout, a, b, total, *_ = make_run_algorithm(run).tasks
    assert [(task.name, task.work, task.pool) for task in (a, b, total)] == [
        ("reward.a", Grade("a"), "reward.a"),
        ("reward.b", Grade("b"), "reward.b"),
        ("reward", AddUp(), "reward"),
    ]
    assert set(a.reads) <= {*rollout.writes, "prompt", "question", "answer", "metadata"}
    assert total.reads == (*a.writes, *b.writes)
    assert total.writes == ("reward", "reward_error", "reward_parts")
    assert total.claims(run) == a.claims(run)
    assert total.claims(run).max_rows == 1  # type: ignore[union-attr]
    check_queue(run.queue, run_table(run))


def test_a_grader_that_sees_groups_claims_them_one_by_one_and_the_others_claim_rows() -> None:
    group = {"grader": {"type": "group_function", "path": "m.f"}}
    for rewards in ({"graders": {"a": EXACT, "b": group}}, group):
        run = config(rewards)
        claims = {task.name: task.claims(run).type for task in make_run_algorithm(run).tasks}
        assert claims["reward.b" if "graders" in rewards else "reward"] == "whole_groups"
        assert claims.get("reward.a", "first_in") == "first_in"


def test_workers_of_rewards_reserve_no_cpu_unless_the_recipe_says_so() -> None:
    cluster = {"reward": {"pools": {"b": {"workers": 2, "gpus": 1.0}}}}
    run = config({"graders": {"a": EXACT, "b": EXACT}}, cluster=cluster, pipeline={"placement": "separated"})
    pools = {name: (pool.workers, pool.cpus, pool.gpus) for name, pool in run_pools(run).items()}
    assert (pools["reward"], pools["reward.a"], pools["reward.b"]) == ((1, 0, 0), (1, 0, 0), (2, 0, 1))


def test_a_replay_has_one_task_of_rewards() -> None:
    run = config({"graders": {"a": EXACT, "b": EXACT}}, pipeline={"replay": "trace.parquet"})
    assert [task.name for task in make_run_algorithm(run).tasks if isinstance(task.work, Grade)] == ["reward"]
