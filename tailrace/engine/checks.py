"""Checks before an engine starts, whatever it is used for."""

from pathlib import Path

import psutil
import torch

from tailrace.config.base import GIB
from tailrace.config.engine import EngineConfig, SamplingConfig
from tailrace.engine.backends.base import Backend
from tailrace.engine.base import Engine
from tailrace.engine.factory import make_backend
from tailrace.errors import ConfigError
from tailrace.models.info import ModelInfo, describe_model


def check_engine(config: EngineConfig, model_dir: Path, *, device: str, here: bool = True) -> None:
    """Check the engine, the model, the device and, on CPUs, the memory.

    The device must have what the engine is configured to use. Without enough memory, Linux would kill processes.
    `here` says whether the engine will be on this machine; the memory of other machines is theirs to check.

    Raises:
        ModelError: the model cannot be read. Whether transformers can read it, `check_model` says.
        ConfigError: the device or the memory does not suffice.
        UserError: vLLM is not installed; or what an adapter's path names is not there, or cannot be called.
    """
    model = describe_model(model_dir)
    backend = make_backend(config)
    backend.check(model_dir, device=torch.device(device))
    if here and torch.device(device).type == "cpu":
        _check_memory(backend, model)


def _check_memory(backend: Backend, model: ModelInfo) -> None:
    if (size := backend.size) is None:
        return
    held = size.held(model.parameters)
    needed, available = sum(held.values()) / GIB, psutil.virtual_memory().available / GIB
    if needed > available:
        parts = ", ".join(f"{name} {bytes_ / GIB:.1f}" for name, bytes_ in held.items())
        raise ConfigError(
            f"the engine needs {needed:.1f} GiB ({parts}), and {available:.1f} GiB are available; "
            f"lower engine.kv_cache_gib, engine.dp or engine.tp"
        )


def check_sampling(config: EngineConfig, sampling: SamplingConfig, model_dir: Path) -> None:
    """Check that the engine can sample as configured, and that the model has the tokens to stop at.

    Raises:
        ModelError: the model cannot be read.
        ConfigError: the engine would sample differently, or the model lacks a token.
    """
    make_backend(config).check_sampling(sampling)
    last = describe_model(model_dir).vocab - 1
    if unknown := [token for token in sampling.stop_token_ids if token > last]:
        raise ConfigError(f"sampling.stop_token_ids has {unknown[0]}, and the model's tokens are 0 … {last}")


def check_context(engine: Engine, *, longest_prompt: int) -> None:
    """Check that the longest prompt fits the engine. Otherwise it would fail in the middle of the run.

    Raises:
        ConfigError: the prompt does not fit.
    """
    if longest_prompt >= engine.max_model_len:
        raise ConfigError(
            f"the longest prompt has {longest_prompt} tokens, and the engine has a context of "
            f"{engine.max_model_len}; remove it"
        )
