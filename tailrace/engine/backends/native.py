"""Tailrace's own engine."""

from concurrent.futures import Executor
from pathlib import Path

import torch

from tailrace.config.engine import NativeEngineConfig
from tailrace.engine.adaptive_tp.report import adaptive_tp_event
from tailrace.engine.core import EngineCore
from tailrace.engine.driver import DrivenEngine
from tailrace.events import EventLog


class NativeEngine(DrivenEngine):
    """Continuous batching over block KV caches, on DP × TP ranks."""

    def __init__(self, config: NativeEngineConfig, model_dir: Path, *, device: str, executor: Executor) -> None:
        """See `EngineCore`."""
        self._native = EngineCore(config, model_dir, device=torch.device(device))
        self._log: EventLog | None = None
        super().__init__(self._native, executor)

    def log_to(self, log: EventLog) -> None:
        """See `Engine`."""
        self._log = log

    def _advanced(self) -> None:
        adaptive_tp = self._native.adaptive_tp
        verdicts = [] if adaptive_tp is None else adaptive_tp.take()
        if self._log is not None:
            for verdict in verdicts:
                self._log.emit(adaptive_tp_event(verdict, self._log))
