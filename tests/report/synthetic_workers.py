"""Events as a run with worker processes writes them: two engines, one of which dies, and a trainer a version behind."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from tailrace.events import Event
from tests.report.synthetic import CONFIG

STEP_S = 8.0
ROLLOUT = ("rollout-0", "rollout-1")
DIED, STARTED = 42.0, 46.0
"""The times when rollout-1 died, and when its replacement started."""


def separated_run(steps: int = 12, seed: int = 0) -> list[Event]:
    """The events of a separated run, ordered by their ends, as they arrive."""
    rng = np.random.default_rng(seed)
    made = [*_start(steps), *_states(steps, rng), *_queue(steps, rng)]
    for step in range(steps):
        made.extend(_rollout(step, rng))
        made.extend(_train(step, rng))
        made.extend(_weights(step + 1, (step + 2) * STEP_S - 0.2, rng))
    return sorted(made, key=lambda event: event.end)


def _start(steps: int) -> Iterator[Event]:
    info = {"config": CONFIG, "tailrace": "0.1.0", "resumed_from": None, "total_steps": steps, "machine": "2 cores"}
    yield Event(task="run", actor="driver", start=0, end=0, info=info)
    for worker in (*ROLLOUT, "reward-0", "trainer"):
        yield Event(task="worker_started", actor=worker, start=0.1, end=0.9)
    how = {"pid": 17, "how": "killed by signal 9"}
    yield Event(task="worker_died", actor="rollout-1", start=DIED, end=DIED, info=how)
    yield Event(task="worker_started", actor="rollout-1", start=DIED + 1, end=STARTED)


def _dead(worker: str, at: float) -> bool:
    return worker == "rollout-1" and DIED <= at < STARTED


def _rollout(step: int, rng: Any) -> Iterator[Event]:
    for worker in ROLLOUT:
        for group in range(4):
            start = step * STEP_S + 1 + group * 1.7
            if _dead(worker, start) or _dead(worker, start + 3):
                continue
            lengths = np.minimum(256, rng.lognormal(4.4, 0.5, 8).astype(int))
            ends = [start + 0.3 + float(length) * 0.02 for length in lengths]
            same: dict[str, Any] = {"step": step, "version": max(0, step - 1), "worker": worker}
            for length, end in zip(lengths, ends, strict=True):
                yield Event(task="sample", actor="engine", start=start, end=end, tokens=int(length), **same)
            tokens = int(lengths.sum())
            yield Event(task="rollout", actor="rollout", start=start, end=max(ends), samples=8, tokens=tokens, **same)
            for end in ends:
                reward: dict[str, Any] = {"worker": "reward-0", "step": step, "samples": 1}
                yield Event(task="reward", actor="reward", start=end, end=end + 0.05, **reward)


def _train(step: int, rng: Any) -> Iterator[Event]:
    start = (step + 1) * STEP_S
    same: dict[str, Any] = {"step": step, "worker": "trainer"}
    for part in range(4):
        at = start + part * 1.6
        yield Event(task="actor", actor="trainer", start=at, end=at + 1.5, samples=16, tokens=1800, **same)
    yield Event(task="optimizer", actor="trainer", start=start + 6.5, end=start + 7.2, **same)
    fresh = int(rng.integers(16, 40)) if step else 64
    stale = 0 if step < 2 else int(rng.integers(0, 6))
    counts = {0: fresh, 1: 64 - fresh - stale, 2: stale}
    metrics = {
        "reward": 0.3 + 0.02 * step + float(rng.normal(0, 0.02)),
        "accuracy": 0.2 + 0.02 * step,
        "response_tokens_mean": 90.0,
        "samples_per_s": 64 / STEP_S,
        "tokens_per_s": 7200 / STEP_S,
        "loss": float(rng.normal(0, 0.02)),
        "grad_norm": float(rng.lognormal(-0.5, 0.3)),
        "time/rollout": 12.0,
        "time/actor": 6.0,
        "time/optimizer": 0.7,
        **{f"staleness/{staleness}": float(count) for staleness, count in counts.items() if count},
        "staleness_mean": sum(staleness * count for staleness, count in counts.items()) / 64,
        "staleness_max": float(max(staleness for staleness, count in counts.items() if count)),
    }
    end = start + STEP_S - 0.1
    yield Event(
        task="step",
        actor="driver",
        start=start,
        end=end,
        step=step,
        version=step,
        samples=64,
        tokens=7200,
        metrics=metrics,
    )


def _weights(version: int, at: float, rng: Any) -> Iterator[Event]:
    """The events of weights published at `at`. The second engine gets them through the first."""
    yield Event(task="weights_publish", actor="trainer", start=at, end=at + 0.4, version=version, worker="trainer")
    for hop, worker in enumerate(ROLLOUT):
        began = at + 0.4 + 0.5 * hop
        came = began + 1.1 + float(rng.uniform(0, 0.4))
        if _dead(worker, began) or _dead(worker, came):
            continue
        same: dict[str, Any] = {"version": version, "worker": worker}
        yield Event(task="weights_transfer", actor=worker, start=began, end=came, **same)
        yield Event(task="update_weights", actor="engine", start=came + 0.1, end=came + 0.35, **same)


def _states(steps: int, rng: Any) -> Iterator[Event]:
    shares = {"rollout-0": (90, 3, 5, 2), "rollout-1": (80, 12, 5, 3), "reward-0": (4, 95, 0, 1)}
    shares |= {"trainer": (82, 13, 4, 1)}
    for second in range(int((steps + 1) * STEP_S)):
        for worker, weights in shares.items():
            if not _dead(worker, second):
                drawn = rng.dirichlet(np.array(weights) + 0.2)
                metrics = dict(zip(("busy", "data", "weights", "idle"), map(float, drawn), strict=True))
                actor = worker.partition("-")[0]
                start, end = float(second), second + 1.0
                yield Event(task="activity", actor=actor, start=start, end=end, metrics=metrics, worker=worker)


def _queue(steps: int, rng: Any) -> Iterator[Event]:
    for second in range(int((steps + 1) * STEP_S)):
        phase = second % STEP_S / STEP_S
        metrics = {
            "ready/rollout": round(40 * (1 - phase)),
            "leased/rollout": 16.0 + int(rng.integers(0, 4)),
            "waiting/rollout": 0.0,
            "ready/reward": float(rng.integers(0, 3)),
            "leased/reward": 1.0,
            "waiting/reward": 56.0,
            "ready/actor": round(48 * phase),
            "leased/actor": 16.0,
            "waiting/actor": 40.0,
            "rows": 120.0 + int(rng.integers(0, 20)),
            "bytes": 2.5e6 + 1e5 * phase,
            "expired/rollout": 16.0 if second > DIED else 0.0,
            "lost_groups": 0.0,
        }
        yield Event(task="queue", actor="driver", start=float(second), end=float(second), metrics=metrics)
