"""The metrics of a step, from rows made by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from tailrace.events import Event
from tailrace.run.step_metrics import Spending, TaskTimes, step_metrics
from tailrace.tasks.actor import StepResult
from tailrace.trainer.base import UpdateResult
from tailrace.transfer.queue.base import Row, RowId
from tailrace.types import FinishReason

NAN = math.nan


def make_row(
    reward: float,
    *,
    group: int = 0,
    tokens: int = 1,
    error: str = "",
    cut: bool = False,
    versions: tuple[int, ...] = (0,),
    log_probs: tuple[float, ...] = (0.0,),
    parts: dict[str, float] | None = None,
) -> Row:
    return Row(
        id=RowId(0, 0),
        group_id=group,
        order=0,
        cells={
            "reward": reward,
            "reward_error": error,
            "reward_parts": parts or {},
            "response_ids": np.zeros(tokens, np.int64),
            "rollout_log_probs": np.array(log_probs, np.float32),
            "weight_versions": np.array(versions),
            "finish_reason": FinishReason.LENGTH if cut else FinishReason.STOP,
        },
    )


def make_update(loss: float, *, applied: bool = True, lr: float = 0.1, **metrics: float) -> UpdateResult:
    return UpdateResult(applied=applied, loss=loss, grad_norm=2 * loss, lr=lr, metrics=metrics)


def metrics_of(
    *rows: Row, updates: tuple[UpdateResult, ...] = (), step: int = 0, seconds: float = 1.0
) -> dict[str, float]:
    return step_metrics(StepResult(rows=rows, updates=updates), step, seconds)


def test_rewards_are_described_by_mean_and_deviation() -> None:
    metrics = metrics_of(make_row(0.0), make_row(0.5), make_row(1.0), make_row(2.5))
    assert metrics["reward"] == 1.0
    assert metrics["reward_std"] == pytest.approx(math.sqrt(3.5 / 4))
    assert "accuracy" not in metrics, "nobody said what is right"


def test_the_entropy_of_sampling_is_the_mean_surprise_of_all_tokens() -> None:
    metrics = metrics_of(make_row(0.0, log_probs=(-1.0, -2.0)), make_row(0.0, log_probs=(-6.0,)))
    assert metrics["sampling_entropy"] == pytest.approx(3.0)


def test_the_entropy_of_sampling_leaves_out_what_tools_have_answered() -> None:
    row = make_row(0.0, log_probs=(-1.0, 0.0, 0.0, -3.0))
    masked = replace(row, cells={**row.cells, "response_mask": np.array([1, 0, 0, 1], np.int8)})
    assert metrics_of(masked)["sampling_entropy"] == pytest.approx(2.0)


def test_accuracy_is_of_the_responses_whose_grader_says_whether_they_are_right() -> None:
    right, wrong = {"correct": 1.0}, {"correct": 0.0}
    rows = [make_row(0.9, parts=right), make_row(1.0, parts=wrong), make_row(0.1, parts=right), make_row(7.0)]
    assert metrics_of(*rows)["accuracy"] == pytest.approx(2 / 3)


def test_parts_are_averaged_over_the_responses_that_have_them() -> None:
    rows = [make_row(1.0, parts={"format": 1.0, "length": 3.0}), make_row(0.0, parts={"format": 0.5}), make_row(NAN)]
    metrics = metrics_of(*rows)
    assert {name: metrics[name] for name in metrics if name.startswith("reward/")} == {
        "reward/format": 0.75,
        "reward/length": 3.0,
    }


def test_a_reward_that_failed_counts_in_no_mean() -> None:
    metrics = metrics_of(
        make_row(1.0, parts={"correct": 1.0}),
        make_row(NAN, error="timeout: 2 s"),
        make_row(0.0, parts={"correct": 0.0}),
    )
    assert (metrics["reward"], metrics["reward_std"], metrics["accuracy"]) == (0.5, 0.5, 0.5)


def test_a_step_without_any_graded_sample_has_no_reward() -> None:
    metrics = metrics_of(make_row(NAN, error="died: SIGKILL"), make_row(NAN, error="died: SIGKILL"))
    assert not {"reward", "reward_std", "accuracy"} & metrics.keys()
    assert not any(map(math.isnan, metrics.values()))


def test_failures_are_counted_by_their_kind() -> None:
    errors = ["timeout: 2 s", "", "ValueError: a: b", "timeout: 3 s", "KeyError"]
    metrics = metrics_of(*(make_row(NAN if error else 1.0, error=error) for error in errors))
    assert {name: value for name, value in metrics.items() if name.startswith("reward_failures")} == {
        "reward_failures": 4.0,
        "reward_failures/timeout": 2.0,
        "reward_failures/ValueError": 1.0,
        "reward_failures/KeyError": 1.0,
    }


def test_a_step_without_failures_counts_none() -> None:
    metrics = metrics_of(make_row(1.0))
    assert [name for name in metrics if name.startswith("reward_failures")] == ["reward_failures"]
    assert metrics["reward_failures"] == 0.0


@pytest.mark.parametrize(
    ("rewards", "flat"),
    [
        ([0.0, 0.0], 1),
        ([0.0, 1.0], 0),
        ([1.0, 1.0, NAN], 1),
        ([NAN, 0.0, 1.0], 0),
        ([NAN, NAN], 1),
    ],
)
def test_a_group_is_flat_when_its_graded_rewards_are_equal(rewards: list[float], flat: int) -> None:
    assert metrics_of(*map(make_row, rewards))["flat_groups"] == flat


def test_rows_belong_to_a_group_by_its_id_and_not_by_their_place() -> None:
    rows = [make_row(reward, group=group) for reward, group in [(0.0, 7), (0.0, 8), (0.0, 7), (1.0, 8)]]
    assert metrics_of(*rows)["flat_groups"] == 1


def test_lengths_truncation_and_speed_are_of_all_responses() -> None:
    rows = [make_row(1.0, tokens=2), make_row(NAN, tokens=9, cut=True, error="timeout: 2 s"), make_row(1.0, tokens=1)]
    metrics = metrics_of(*rows, make_row(0.0, tokens=4), seconds=2.0)
    assert metrics["response_tokens_mean"] == 4.0
    assert metrics["response_tokens_max"] == 9.0
    assert metrics["truncated_fraction"] == 0.25
    assert metrics["samples_per_s"] == 2.0
    assert metrics["tokens_per_s"] == 8.0


def test_updates_are_averaged_without_the_skipped_ones() -> None:
    updates = (
        make_update(1.0, lr=0.1, entropy=4.0),
        make_update(NAN, applied=False, lr=9.0),
        make_update(3.0, lr=0.3, entropy=2.0),
    )
    metrics = metrics_of(make_row(1.0), updates=updates)
    assert (metrics["loss"], metrics["grad_norm"], metrics["entropy"]) == (2.0, 4.0, 3.0)
    assert metrics["lr"] == pytest.approx(0.2)
    assert metrics["skipped_updates"] == 1.0


def test_a_metric_that_a_loss_has_only_now_and_then_is_averaged_over_the_updates_that_have_it() -> None:
    updates = (make_update(1.0), make_update(1.0, late=4.0), make_update(1.0, late=2.0))
    assert metrics_of(make_row(1.0), updates=updates)["late"] == 3.0


def test_a_step_whose_updates_were_all_skipped_has_no_loss() -> None:
    metrics = metrics_of(make_row(1.0), updates=(make_update(NAN, applied=False, entropy=1.0),) * 2)
    assert metrics["skipped_updates"] == 2.0
    assert not {"loss", "grad_norm", "lr", "entropy"} & metrics.keys()


def make_span(task: str, start: float, end: float) -> Event:
    return Event(actor="a", task=task, start=start, end=end)


def passed(times: TaskTimes | Spending, *events: Event) -> dict[str, float]:
    """The metrics of a step that ends after `events`."""
    step = make_span("step", 0.0, 9.0)
    for event in (*events, step):
        times(event)
    return step.metrics


def test_a_step_gets_the_times_that_its_tasks_took_since_the_one_before() -> None:
    times = TaskTimes()
    spans = make_span("reward", 1.0, 2.0), make_span("actor", 1.5, 4.0), make_span("reward", 1.0, 1.5)
    assert passed(times, *spans) == {"time/reward": 1.5, "time/actor": 2.5}
    assert passed(times) == {}
    assert passed(times, make_span("reward", 5.0, 5.25)) == {"time/reward": 0.25}


def test_a_step_gets_the_mean_figures_of_models_beside_the_policy() -> None:
    updates = [
        Event(actor=actor, task="optimizer", start=1.0, end=1.0, metrics={"loss": loss})
        for actor, loss in (("critic", 1.0), ("trainer", 7.0), ("critic", 3.0))
    ]
    times = TaskTimes()
    assert passed(times, *updates) == {"time/optimizer": 0.0, "critic/loss": 2.0}
    assert passed(times) == {}


def test_events_that_are_no_work_of_a_task_have_no_time() -> None:
    assert passed(TaskTimes(), make_span("sample", 0.0, 1.0), make_span("evaluation", 0.0, 1.0)) == {}


def test_a_step_gets_what_gradings_have_spent_since_the_one_before() -> None:
    def grading(**spent: float) -> Event:
        metrics = {f"spent/{what}": amount for what, amount in spent.items()}
        return Event(actor="reward", task="reward", start=0.0, end=1.0, metrics=metrics)

    spending = Spending()
    evaluation = Event(actor="driver", task="evaluation", start=0.0, end=1.0, metrics={"spent/cost": 7.0})
    assert passed(spending, grading(cost=0.5, requests=1), evaluation, grading(cost=0.25)) == {
        "spent/cost": 0.75,
        "spent/requests": 1,
    }
    assert passed(spending) == {}
    assert passed(spending, grading(cost=2.0)) == {"spent/cost": 2.0}


def test_staleness_is_counted_from_the_oldest_token() -> None:
    metrics = metrics_of(*(make_row(1.0, versions=versions) for versions in ((3,), (2, 3), (3, 3), (1, 2, 3))), step=3)
    assert (metrics["staleness_mean"], metrics["staleness_max"]) == (0.75, 2.0)
    assert {name: metrics[name] for name in metrics if "/" in name} == {
        "staleness/0": 2.0,
        "staleness/1": 1.0,
        "staleness/2": 1.0,
    }
