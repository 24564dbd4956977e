"""What has to be right before an engine starts, whatever it is to be used for."""

import asyncio
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

import torch

from tailrace.allocator import keep_freed_memory
from tailrace.config.engine import EngineConfig, NativeEngineConfig, SamplingConfig, VllmEngineConfig
from tailrace.engine.backends.vllm import unsupported
from tailrace.engine.base import Engine
from tailrace.engine.factory import make_engine
from tailrace.errors import ConfigError, UserError
from tailrace.models.info import describe_model


def prepare_torch(device: str, threads: int | None) -> None:
    """Set torch's threads and memory for the whole process, and see that the device is there.

    Raises:
        ConfigError: it is not.
    """
    keep_freed_memory()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        raise ConfigError(f"device {device!r} cannot be used here: {reason}") from None


def context_length(engine: EngineConfig, model_dir: Path) -> int:
    """Tokens of a sequence at the most, as the model and the configuration have it.

    Raises:
        ModelError: the model cannot be read.
    """
    context = describe_model(model_dir).context_length
    if isinstance(engine, NativeEngineConfig | VllmEngineConfig) and engine.max_model_len is not None:
        context = min(context, engine.max_model_len)
    return context


async def open_engine(config: EngineConfig, model_dir: Path, *, device: str, executor: Executor) -> Engine:
    """Make an engine in `executor`. When cancelled meanwhile, close what was made before returning.

    That too is awaited, and not left to the executor's end, which would block the event loop with its signal handlers.
    """
    make = partial(make_engine, config, model_dir, device=device, executor=executor)
    future = asyncio.get_running_loop().run_in_executor(executor, make)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        if future.exception() is None:
            await future.result().close()
        raise


def check_new_file(option: str, path: Path, *, force: bool) -> None:
    """Whether the file that `option` names can be made, or replaced with `force`.

    Raises:
        UserError: it exists and is not to be replaced, or has no directory to be in.
    """
    if path.exists() and not force:
        raise UserError(f"{option} {path} exists; give another file, or replace it with --force")
    if not path.parent.is_dir():
        raise UserError(f"{option} {path} cannot be made: {path.parent} is not a directory")


def check_sampling(config: EngineConfig, sampling: SamplingConfig) -> None:
    """Whether the engine samples as it is told to.

    Raises:
        ConfigError: it does not.
    """
    if isinstance(config, VllmEngineConfig) and (reason := unsupported(sampling)):
        raise ConfigError(f"sampling has {reason}")


def check_cache(config: EngineConfig, engine: Engine, *, longest_prompt: int, max_new_tokens: int) -> None:
    """Whether the longest sequence fits the KV cache by itself: if not, it would fail in the middle of the run.

    Raises:
        ConfigError: it does not.
    """
    if not isinstance(config, NativeEngineConfig):
        return
    room = engine.stats().total_blocks // config.dp * config.block_size
    needed = min(longest_prompt + max_new_tokens, engine.max_model_len)
    if needed > room:
        raise ConfigError(
            f"engine.kv_cache_gib {config.kv_cache_gib} holds {room} tokens, but the longest prompt with "
            f"sampling.max_new_tokens {max_new_tokens} takes {needed}; raise it or lower that"
        )
