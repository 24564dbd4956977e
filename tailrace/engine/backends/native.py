"""Tailrace's own engine."""

from concurrent.futures import Executor
from pathlib import Path

import torch

from tailrace.config.engine import NativeEngineConfig
from tailrace.engine.core import EngineCore
from tailrace.engine.driver import DrivenEngine


class NativeEngine(DrivenEngine):
    """Continuous batching over block KV caches, on DP × TP ranks."""

    def __init__(self, config: NativeEngineConfig, model_dir: Path, *, device: str, executor: Executor) -> None:
        """See `EngineCore`."""
        super().__init__(EngineCore(config, model_dir, device=torch.device(device)), executor)
