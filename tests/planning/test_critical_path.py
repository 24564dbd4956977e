"""Claims on the graph of a table of tasks."""

import pytest

from tailrace.planning.critical_path import critical_path, graph_of
from tailrace.types import TaskSpec

TABLE = (
    TaskSpec(name="rollout", reads=("prompt",), writes=("response",)),
    TaskSpec(name="reward", reads=("response",), writes=("reward",)),
    TaskSpec(name="reference", reads=("prompt", "response"), writes=("ref_log_probs",)),
    TaskSpec(name="advantage", reads=("reward",), writes=("advantages",)),
    TaskSpec(name="actor", reads=("response", "advantages", "ref_log_probs")),
)


def test_a_task_waits_for_those_that_write_what_it_reads() -> None:
    graph = graph_of(TABLE)
    assert graph["rollout"] == frozenset()
    assert graph["advantage"] == {"reward"}
    assert graph["actor"] == {"rollout", "advantage", "reference"}


@pytest.mark.parametrize(
    ("reward_s", "way", "seconds"),
    [
        (1.0, ("rollout", "reference", "actor"), 10 + 3 + 5),
        (4.0, ("rollout", "reward", "advantage", "actor"), 10 + 4 + 5),
    ],
)
def test_the_longest_way_counts_and_what_costs_nothing_is_free(
    reward_s: float, way: tuple[str, ...], seconds: float
) -> None:
    costs = {"rollout": 10.0, "reward": reward_s, "reference": 3.0, "actor": 5.0}
    assert critical_path(graph_of(TABLE), costs) == (way, seconds)


def test_no_tasks_take_no_time() -> None:
    assert critical_path({}, {}) == ((), 0.0)
