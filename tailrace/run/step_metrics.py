"""The figures of one training step, from its rows and its updates."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from tailrace.algorithms.figures import step_figures
from tailrace.events import Event
from tailrace.planning.admission import staleness
from tailrace.registers.events import EventKind
from tailrace.registers.metrics import STALENESS, TIME
from tailrace.rewards.base import CORRECT, failure_kind
from tailrace.tasks.actor import POLICY_ROW, StepResult
from tailrace.tasks.compute import REMADE
from tailrace.trainer.base import UpdateResult
from tailrace.transfer.queue.base import Row
from tailrace.types import FinishReason


class TaskTimes:
    """A sink that adds up figures of events since the step before, for passing `step` events. It must be the first.

    `time/<task>`: seconds of each task; tasks overlap, so they may exceed the wall clock. `remade_groups`: groups that
    were thrown away, where an algorithm does that. `critic/<figure>`: the mean over the critic's optimizer steps; so
    for any other model that is trained beside the policy, under the name of its row.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._updates: dict[str, list[float]] = {}

    def __call__(self, event: Event) -> None:
        """Count one span, or add the sums to a `step` event."""
        if event.task == EventKind.STEP:
            event.metrics |= self._sums | {name: statistics.fmean(values) for name, values in self._updates.items()}
            self._sums, self._updates = {}, {}
            return
        if event.about.is_timed:
            self._add(f"{TIME.prefix}{event.task}", event.end - event.start)
        if REMADE in event.metrics:
            self._add(REMADE, event.metrics[REMADE])
        if event.task == EventKind.OPTIMIZER and event.actor != POLICY_ROW:
            for name, value in event.metrics.items():
                self._updates.setdefault(f"{event.actor}/{name}", []).append(value)

    def _add(self, name: str, value: float) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + value


class Spending:
    """A sink that adds up what gradings took, and writes it into passing `step` events as `spent/<what>`."""

    def __init__(self) -> None:
        self._spent: Counter[str] = Counter()

    def __call__(self, event: Event) -> None:
        """Count one claim of the reward task, or add the sums to a `step` event."""
        if event.task == EventKind.REWARD:
            self._spent.update(event.metrics)
        elif event.task == EventKind.STEP:
            event.metrics |= self._spent
            self._spent.clear()


def step_metrics(result: StepResult, step: int, seconds: float) -> dict[str, float]:
    """Every figure of training step `step`, which took `seconds`."""
    lengths = [response_tokens(row) for row in result.rows]
    return {
        **reward_metrics(
            [cast(float, row.cells["reward"]) for row in result.rows],
            [cast("Mapping[str, float]", row.cells["reward_parts"]) for row in result.rows],
        ),
        **failure_metrics([cast(str, row.cells["reward_error"]) for row in result.rows]),
        "flat_groups": float(_flat_groups(result.rows)),
        "response_tokens_mean": statistics.fmean(lengths),
        "response_tokens_max": float(max(lengths)),
        "truncated_fraction": statistics.fmean(
            row.cells["finish_reason"] == FinishReason.LENGTH for row in result.rows
        ),
        **_entropy_metrics(result.rows),
        **_staleness_metrics(result.rows, step),
        "samples_per_s": len(lengths) / seconds,
        "tokens_per_s": sum(lengths) / seconds,
        **update_metrics(result.updates),
    }


def reward_metrics(rewards: Sequence[float], parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean and standard deviation of the rewards that were graded, and the graders' other figures.

    `accuracy`: the fraction that is right, of the responses with a verdict of their grader. `reward/<part>`: the
    mean of each other part, over the responses that have it. A part that no response has is left out.
    """
    graded = [reward for reward in rewards if not math.isnan(reward)]
    values: dict[str, list[float]] = {}
    for named in parts:
        for name, value in named.items():
            values.setdefault("accuracy" if name == CORRECT else f"reward/{name}", []).append(value)
    means = {name: statistics.fmean(of_part) for name, of_part in sorted(values.items())}
    if not graded:
        return means
    return {"reward": statistics.fmean(graded), "reward_std": statistics.pstdev(graded), **means}


def failure_metrics(errors: Iterable[str | None]) -> dict[str, float]:
    """`reward_failures`, the responses with a failed grading, and `reward_failures/<kind>` for each kind that occurred.

    `errors`: of each response, a line for each of its gradings that failed.
    """
    failed = [error for error in errors if error]
    kinds = Counter(failure_kind(line) for error in failed for line in error.splitlines())
    return {
        "reward_failures": float(len(failed)),
        **{f"reward_failures/{kind}": float(count) for kind, count in kinds.items()},
    }


def response_tokens(row: Row) -> int:
    """Number of tokens of a row that the policy has generated: of its response, without those of tools."""
    cells = cast("Mapping[str, np.ndarray[Any, Any]]", row.cells)
    mask = cells.get("response_mask")
    return len(cells["response_ids"]) if mask is None else int(mask.sum())


def _flat_groups(rows: Sequence[Row]) -> int:
    """Number of groups whose graded rewards are all equal: they teach nothing."""
    rewards: dict[int, set[float]] = {}
    for row in rows:
        reward = cast(float, row.cells["reward"])
        rewards.setdefault(row.group_id, set()).update(() if math.isnan(reward) else (reward,))
    return sum(len(values) <= 1 for values in rewards.values())


def _entropy_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """`sampling_entropy`: nats a token, estimated by the mean surprise of the tokens that were sampled."""
    surprise = np.concatenate([_sampled_log_probs(row) for row in rows])
    return {"sampling_entropy": -float(np.mean(surprise, dtype=np.float64))}


def _sampled_log_probs(row: Row) -> "np.ndarray[Any, Any]":
    """Those of the tokens that the policy has generated; see `response_tokens`."""
    cells = cast("Mapping[str, np.ndarray[Any, Any]]", row.cells)
    mask = cells.get("response_mask")
    return cells["rollout_log_probs"] if mask is None else cells["rollout_log_probs"][mask.astype(bool)]


def _staleness_metrics(rows: Sequence[Row], step: int) -> dict[str, float]:
    """Mean and largest staleness, and `staleness/<versions>`, the number of samples of each."""
    oldest = [int(cast("np.ndarray[Any, Any]", row.cells["weight_versions"]).min()) for row in rows]
    ages = [staleness(step, version) for version in oldest]
    return {
        "staleness_mean": statistics.fmean(ages),
        "staleness_max": float(max(ages)),
        **{f"{STALENESS.prefix}{age}": float(count) for age, count in sorted(Counter(ages).items())},
    }


def update_metrics(updates: Sequence[UpdateResult]) -> Mapping[str, float]:
    """The figures of the optimizer steps that were applied, and those of the batch where nothing of it was left."""
    applied = [
        {**update.metrics, "loss": update.loss, "grad_norm": update.grad_norm, "lr": update.lr}
        for update in updates
        if update.applied
    ]
    untrained = [update.metrics for update in updates if not update.applied and update.metrics.get("tokens") == 0]
    return {**step_figures(applied, untrained), "skipped_updates": float(len(updates) - len(applied))}
