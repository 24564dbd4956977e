"""From a configuration to an engine."""

from concurrent.futures import Executor
from pathlib import Path

from tailrace.config.engine import (
    AdapterEngineConfig,
    EngineConfig,
    FakeEngineConfig,
    HfEngineConfig,
    NativeEngineConfig,
    VllmEngineConfig,
)
from tailrace.engine.base import Engine


def make_engine(config: EngineConfig, model_dir: Path, *, device: str, executor: Executor) -> Engine:
    """Make the engine that `config` asks for, with the weights in `model_dir` as version 0.

    Args:
        device: a torch device.
        executor: single-threaded; all of the engine's computation runs there. The caller shuts it down.

    Raises:
        ModelError: the model cannot be read or run.
        ConfigError: the cache cannot hold a block, or the device cannot hold the cache.
        UserError: an adapter is not there, or is no engine.
    """
    match config:
        case NativeEngineConfig():
            from tailrace.engine.backends.native import NativeEngine

            return NativeEngine(config, model_dir, device=device, executor=executor)
        case HfEngineConfig():
            from tailrace.engine.backends.hf import HfEngine

            return HfEngine(config, model_dir, device=device, executor=executor)
        case VllmEngineConfig():
            from tailrace.engine.backends.vllm import VllmEngine

            return VllmEngine(config, model_dir, device=device, executor=executor)
        case FakeEngineConfig():
            from tailrace.engine.backends.fake import FakeEngine, RandomPlaywright

            return FakeEngine(executor=executor, playwright=RandomPlaywright(config.vocab_size))
        case AdapterEngineConfig():
            from tailrace.engine.backends.adapter import open_adapter

            return open_adapter(config, model_dir, device=device, executor=executor)
