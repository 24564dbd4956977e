"""Makes an engine from its configuration. `make_backend` is the register of all engines."""

from tailrace.config.engine import (
    AdapterEngineConfig,
    EngineConfig,
    FakeEngineConfig,
    HfEngineConfig,
    NativeEngineConfig,
    VllmEngineConfig,
)
from tailrace.engine.backends.base import Backend
from tailrace.engine.base import Engine, EngineArgs


def make_backend(config: EngineConfig) -> Backend:
    """Make the backend of the engine that `config` asks for. Only its own module is imported: some take seconds."""
    match config:
        case NativeEngineConfig():
            from tailrace.engine.backends.native import NativeBackend

            return NativeBackend(config)
        case VllmEngineConfig():
            from tailrace.engine.backends.vllm import VllmBackend

            return VllmBackend(config)
        case HfEngineConfig():
            from tailrace.engine.backends.hf import HfBackend

            return HfBackend(config)
        case FakeEngineConfig():
            from tailrace.engine.backends.fake import FakeBackend

            return FakeBackend(config)
        case AdapterEngineConfig():
            from tailrace.engine.backends.adapter import AdapterBackend

            return AdapterBackend(config)


def make_engine(config: EngineConfig, args: EngineArgs) -> Engine:
    """Make the engine that `config` asks for.

    Raises:
        ModelError: the model cannot be read or run.
        ConfigError: the cache cannot hold a block, or the device cannot hold the cache.
        UserError: the factory of an adapter is not there, or makes no engine.
    """
    return make_backend(config).make(args)
