"""What has to be right before an engine starts, whatever it is to be used for."""

from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from tailrace.config.engine import (
    AdapterEngineConfig,
    EngineConfig,
    FakeEngineConfig,
    NativeEngineConfig,
    SamplingConfig,
    VllmEngineConfig,
)
from tailrace.engine.backends.adapter import load_engine_factory
from tailrace.engine.backends.vllm import check_installed, unsupported
from tailrace.engine.base import Engine
from tailrace.engine.decoder.factory import local_sizes, longest_sequence
from tailrace.errors import ConfigError
from tailrace.models.architecture import read_architecture
from tailrace.models.info import describe_model
from tailrace.models.loading import check_model
from tailrace.planning.estimate import GIB, engine_memory

if TYPE_CHECKING:
    pass


def context_length(engine: EngineConfig, model_dir: Path) -> int:
    """Tokens of a sequence at most, as the model and the configuration have it.

    Raises:
        ModelError: the model cannot be read.
        ConfigError: the configuration asks for more than the model has.
    """
    context = describe_model(model_dir).context_length
    if isinstance(engine, NativeEngineConfig | VllmEngineConfig) and engine.max_model_len is not None:
        if engine.max_model_len > context:
            raise ConfigError(
                f"engine.max_model_len {engine.max_model_len} exceeds the model's context of {context}; lower it"
            )
        context = engine.max_model_len
    return context


def check_engine(config: EngineConfig, model_dir: Path, *, device: str, here: bool = True) -> None:
    """Whether there is such an engine, the device has what it is configured to use, and CPUs the memory: Linux would
    kill processes.

    `here`: whether it will be on this machine; the memory of others is theirs to check.

    Raises:
        ModelError: engine or trainer cannot read the model.
        ConfigError: it does not.
        UserError: vLLM is not installed; or what an adapter's path names is not there, or cannot be called.
    """
    check_model(model_dir)
    if isinstance(config, AdapterEngineConfig):
        load_engine_factory(config)
    if isinstance(config, FakeEngineConfig) and config.vocab_size > (vocab := describe_model(model_dir).vocab):
        raise ConfigError(
            f"engine.vocab_size {config.vocab_size} is more than the {vocab} tokens of the model; lower it"
        )
    if isinstance(config, VllmEngineConfig):
        check_installed()
    if torch.device(device).type != "cpu":
        return
    if isinstance(config, NativeEngineConfig):
        if config.cuda_graphs:
            raise ConfigError(f"engine.cuda_graphs is for CUDA devices, not for {device}; leave it out")
        if config.collectives == "nccl":
            raise ConfigError(f"engine.collectives=nccl is for CUDA devices, not for {device}; use auto")
    if not here:
        return
    memory = engine_memory(config, describe_model(model_dir).parameters)
    needed, available = sum(memory.values()) / GIB, psutil.virtual_memory().available / GIB
    if needed > available:
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in memory.items())
        raise ConfigError(
            f"the engine needs {needed:.1f} GiB ({parts}), and {available:.1f} GiB are available; "
            f"lower engine.kv_cache_gib, engine.dp or engine.tp"
        )


def check_sampling(config: EngineConfig, sampling: SamplingConfig, model_dir: Path) -> None:
    """Whether the engine samples as it is told to, and the model has the tokens to stop at.

    Raises:
        ModelError: the model cannot be read.
        ConfigError: it does not.
    """
    if isinstance(config, VllmEngineConfig) and (reason := unsupported(sampling)):
        raise ConfigError(f"sampling has {reason}")
    last = describe_model(model_dir).vocab - 1
    if unknown := [token for token in sampling.stop_token_ids if token > last]:
        raise ConfigError(f"sampling.stop_token_ids has {unknown[0]}, and the model's tokens are 0 … {last}")


def check_context(engine: Engine, *, longest_prompt: int) -> None:
    """Whether the longest prompt fits the engine: if not, it would fail in the middle of the run.

    Raises:
        ConfigError: it does not.
    """
    if longest_prompt >= engine.max_model_len:
        raise ConfigError(
            f"the longest prompt has {longest_prompt} tokens, and the engine has a context of "
            f"{engine.max_model_len}; remove it"
        )


def check_cache(config: EngineConfig, model_dir: Path, *, longest_prompt: int, max_new_tokens: int) -> None:
    """Whether the longest sequence fits the KV cache of a native engine by itself.

    Raises:
        ConfigError: it does not.
        ModelError: the model cannot be split in `engine.tp` shards.
    """
    if not isinstance(config, NativeEngineConfig):
        return
    architecture = read_architecture(model_dir)
    _, blocks = local_sizes(config, architecture, config.tp)
    room = blocks * config.block_size
    needed = min(longest_prompt + max_new_tokens, longest_sequence(config, architecture))
    if needed > room:
        raise ConfigError(
            f"engine.kv_cache_gib {config.kv_cache_gib} holds {room} tokens, but the longest prompt with "
            f"sampling.max_new_tokens {max_new_tokens} takes {needed}; raise it or lower that"
        )
