"""An engine and a trainer that take a set time, so that several of them run beside each other on few cores.

For `engine: {type: adapter, path: paced.make_engine}` and `trainer.backend: {type: adapter, path: paced.make_trainer}`.
What they compute is real. The rest of their time is slept, in the thread that computes.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from tailrace.config.engine import NativeEngineConfig
from tailrace.engine.base import Engine, EngineArgs
from tailrace.engine.core import EngineCore
from tailrace.engine.driver import DrivenEngine
from tailrace.trainer.backends.single import SingleTrainer
from tailrace.trainer.base import Loss, TrainerArgs, TrainSample
from tailrace.types import Sample


class _PacedCore(EngineCore):
    """The native engine's core, whose steps take at least `step_s`."""

    def __init__(self, config: NativeEngineConfig, model_dir: Path, device: torch.device, step_s: float) -> None:
        super().__init__(config, model_dir, device=device)
        self._step_s = step_s

    def step(self) -> list[Sample]:
        due = time.perf_counter() + self._step_s
        samples = super().step()
        time.sleep(max(0.0, due - time.perf_counter()))
        return samples


class _PacedTrainer(SingleTrainer):
    """The trainer of one process, which takes at least `token_s` for each token of the responses."""

    def __init__(self, args: TrainerArgs, token_s: float) -> None:
        super().__init__(args)
        self._token_s = token_s

    def accumulate(self, samples: Sequence[TrainSample], loss: Loss) -> None:
        due = time.perf_counter() + self._token_s * sum(len(sample.response_ids) for sample in samples)
        super().accumulate(samples, loss)
        time.sleep(max(0.0, due - time.perf_counter()))


def make_engine(args: EngineArgs, *, step_s: float, **native: object) -> Engine:
    """Make the engine. `native`: options as for the native engine."""
    core = _PacedCore(NativeEngineConfig.model_validate(native), args.model_dir, torch.device(args.device), step_s)
    return DrivenEngine(core, args.executor)


def make_trainer(args: TrainerArgs, *, token_s: float) -> SingleTrainer:
    """Make the trainer."""
    return _PacedTrainer(args, token_s)
