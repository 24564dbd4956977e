"""The recipe chooses the policy of a task by `queue.policies`; one that does not fit its task is refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tailrace.commands.queue_serve import load_served
from tailrace.config.load import load_config
from tailrace.config.run import RunConfig
from tailrace.config.written import shown
from tailrace.errors import ConfigError
from tailrace.run.queue import check_queue, run_table
from tests.helpers.runs import small_run

EXACT = {"grader": {"type": "exact"}}
SEES_GROUPS = {"grader": {"type": "group_function", "path": "m.f"}}
FIRST_IN: dict[str, Any] = {"type": "first_in", "max_rows": 4}
OLDEST: dict[str, Any] = {"type": "oldest_version"}
GROUPS: dict[str, Any] = {"type": "whole_groups", "max_groups": 2}
BALANCED: dict[str, Any] = {"type": "balanced", "ranks": 2, "rows": 8}
STEPS: dict[str, Any] = {"type": "token_budget", "window": 8}
STREAMING = {"pipeline": {"streaming": True}}
IN_ORDER = {"pipeline": {"streaming": True, "in_order": True}}


def config(policies: dict[str, Any], **changes: Any) -> RunConfig:
    queue = {"type": "local", **changes.pop("queue", {}), "policies": policies}
    return small_run(Path("run"), Path("model"), Path("prompts.jsonl"), queue=queue, **changes)


def test_the_algorithm_chooses_where_the_recipe_does_not() -> None:
    plain, given = run_table(config({})), run_table(config({"reward": FIRST_IN}))
    assert [task.name for task, other in zip(plain.tasks, given.tasks, strict=True) if task != other] == ["reward"]
    assert given.tasks[1].policy.model_dump() == FIRST_IN


@pytest.mark.parametrize(
    ("policies", "changes"),
    [
        ({"rollout": FIRST_IN, "reward": FIRST_IN, "advantage": GROUPS, "actor": STEPS}, {}),
        ({"actor": {**STEPS, "window": 1}}, {}),
        ({"actor": {**STEPS, "window": 4, "tokens": 99}}, STREAMING),
        ({"reward.a": GROUPS, "reward": GROUPS}, {"rewards": {"graders": {"a": SEES_GROUPS, "b": EXACT}}}),
        ({"reward": FIRST_IN}, {"rewards": {"graders": {"a": EXACT}}, "pipeline": {"replay": "trace.parquet"}}),
        ({"critic": STEPS, "values": FIRST_IN}, {"algorithm": {"type": "ppo", "group_size": 4}}),
    ],
)
def test_a_policy_that_fits_its_task_is_taken(policies: dict[str, Any], changes: dict[str, Any]) -> None:
    run = config(policies, **changes)
    table = run_table(run)
    check_queue(run.queue, table)
    assert {task.name: task.policy.type for task in table.tasks if task.name in policies} == {
        name: policy["type"] for name, policy in policies.items()
    }


@pytest.mark.parametrize(
    ("policies", "message", "changes"),
    [
        ({"rewrd": FIRST_IN}, r"rewrd: the algorithm has no such task; .*; did you mean 'reward'\?$", {}),
        ({"advantage": FIRST_IN}, r"advantage.type=first_in: .* works on whole groups; choose whole_groups$", {}),
        ({"reward.a": FIRST_IN}, "works on whole groups", {"rewards": {"graders": {"a": SEES_GROUPS, "b": EXACT}}}),
        ({"rollout": BALANCED}, "splits batches among ranks", {}),
        ({"rollout": OLDEST}, "it looks at weight_versions, which the task does not read", {}),
        ({"reward": {**STEPS, "tokens": 9, "response_column": "response"}}, "looks at prompt_ids, which the task", {}),
        (
            {"reference": {**STEPS, "tokens": 9}},
            "gathers rows until a claim is full",
            {"algorithm": {"type": "grpo", "group_size": 4, "kl": {"coefficient": 0.1}}},
        ),
        ({"actor": GROUPS}, "could get rows of another one; choose token_budget with window=8$", {}),
        ({"actor": BALANCED}, "choose token_budget with window=8$", {}),
        ({"actor": {**STEPS, "window": None}}, "window is none, which does not .*=8, .*; give window=8, or 1", {}),
        ({"actor": {**STEPS, "window": 3}}, "window is 3, which does not divide", {}),
        ({"actor": {**STEPS, "tokens": 9}}, "leave tokens out, or set pipeline.streaming=true", {}),
        (
            {"actor": {**STEPS, "tokens": 9, "response_column": "prompt"}},
            "counts the elements of prompt, which holds str",
            STREAMING,
        ),
        ({"actor": STEPS}, "window is 8, and pipeline.in_order=true", IN_ORDER),
        (
            {"actor": {**STEPS, "window": 1, "tokens": 9}},
            "which queue.controllers=2 do not keep; give window=8, or queue.controllers=1$",
            {**STREAMING, "queue": {"type": "service", "controllers": 2}},
        ),
    ],
)
def test_a_policy_that_would_break_its_task_is_one_line(
    policies: dict[str, Any], message: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=rf"^queue\.policies\..*{message}") as caught:
        run_table(config(policies, **changes))
    assert "\n" not in str(caught.value)


def test_a_resolved_recipe_shows_policies_only_where_they_are_given() -> None:
    assert "policies" not in shown(config({}))["queue"]
    assert shown(config({"reward": FIRST_IN}))["queue"]["policies"] == {"reward": FIRST_IN}


def test_one_override_gives_the_policy_of_one_task(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(shown(config({"advantage": GROUPS}))))
    made = load_config(recipe, ["queue.policies.reward={type: first_in, max_rows: 3}"])
    assert made.queue.policies["reward"].max_rows == 3  # type: ignore[union-attr]
    assert set(made.queue.policies) == {"advantage", "reward"}  # type: ignore[union-attr]
    assert load_served(recipe, []).config.table.tasks[2].policy.model_dump() == GROUPS


def test_a_table_of_ones_own_has_its_policies_in_its_tasks(tmp_path: Path) -> None:
    recipe = tmp_path / "table.yaml"
    tasks = [{"name": "sink", "reads": ["prompt_ids"]}]
    recipe.write_text(yaml.safe_dump({"queue": {"policies": {"sink": FIRST_IN}}, "table": {"tasks": tasks}}))
    with pytest.raises(ConfigError, match=r"queue\.policies is for the recipe of a run; .* in table\.tasks$"):
        load_served(recipe, [])
