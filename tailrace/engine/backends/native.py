"""Tailrace's own engine."""

from pathlib import Path

import torch

from tailrace.config.base import GIB
from tailrace.config.engine import NativeEngineConfig
from tailrace.engine.backends.base import Backend, limited_context
from tailrace.engine.base import Engine, EngineArgs
from tailrace.engine.core import EngineCore
from tailrace.engine.decoder.factory import local_sizes, longest_sequence
from tailrace.engine.driver import DrivenEngine
from tailrace.errors import ConfigError
from tailrace.events import EventLog
from tailrace.models.architecture import Architecture, read_architecture
from tailrace.planning.engine_size import EngineSize
from tailrace.planning.tp_verdict import adaptive_tp_event


class NativeEngine(DrivenEngine):
    """Continuous batching over block KV caches, on DP × TP ranks."""

    def __init__(self, config: NativeEngineConfig, args: EngineArgs) -> None:
        """See `EngineCore`."""
        self._native = EngineCore(config, args.model_dir, device=torch.device(args.device))
        self._log: EventLog | None = None
        super().__init__(self._native, args.executor)

    def log_to(self, log: EventLog) -> None:
        """See `Engine`."""
        self._log = log

    def _advanced(self) -> None:
        adaptive_tp = self._native.adaptive_tp
        verdicts = [] if adaptive_tp is None else adaptive_tp.take()
        if self._log is not None:
            for verdict in verdicts:
                self._log.emit(adaptive_tp_event(verdict, self._log))


class NativeBackend(Backend):
    """The backend of the native engine. It knows the ranks in advance, and so all answers."""

    def __init__(self, config: NativeEngineConfig) -> None:
        self._config = config

    def make(self, args: EngineArgs) -> Engine:
        """See `EngineCore`."""
        return NativeEngine(self._config, args)

    @property
    def capacity(self) -> int:
        """The batch sizes of all replicas together."""
        return self._config.dp * self._config.max_batch_size

    @property
    def size(self) -> EngineSize:
        """A process for each of several ranks. New weights go to these whole and in fp32, two versions at most."""
        config = self._config
        processes = config.ranks if config.ranks > 1 else 0
        return EngineSize(
            dtype=config.dtype,
            tp=config.tp,
            dp=config.dp,
            slots=config.max_batch_size,
            cache_bytes=config.kv_cache_gib * GIB,
            step_tokens=config.prefill_tokens,
            processes=processes,
            staged_bytes=2 * 4.0 if processes else 0.0,
        )

    def context_length(self, model_dir: Path) -> int:
        """See `limited_context`."""
        return limited_context(self._config.max_model_len, model_dir)

    def check(self, model_dir: Path, *, device: torch.device) -> None:
        """Check that the device has what the recipe asks for.

        Raises:
            ConfigError: the device lacks something.
        """
        if device.type == "mps":
            raise ConfigError(
                f"device {device} has no float64, by which the native engine draws tokens; use cpu, or engine.type=hf"
            )
        if device.type not in ("cpu", "cuda") and self._config.ranks > 1:
            raise ConfigError(
                f"device {device} takes one rank, and engine.tp x engine.dp is {self._config.ranks}; several ranks are "
                "for cpu and cuda"
            )
        if device.type != "cpu":
            return
        if self._config.cuda_graphs:
            raise ConfigError(f"engine.cuda_graphs is for CUDA devices, not for {device}; leave it out")
        if self._config.collectives == "nccl":
            raise ConfigError(f"engine.collectives=nccl is for CUDA devices, not for {device}; use auto")

    def check_cache(self, model_dir: Path, *, longest_prompt: int, max_new_tokens: int) -> None:
        """See `Backend`.

        Raises:
            ConfigError: the longest sequence does not fit.
            ModelError: the model cannot be split in `engine.tp` shards.
        """
        config, architecture = self._config, read_architecture(model_dir)
        rooms = {tp: local_sizes(config, architecture, tp)[1] * config.block_size for tp in self._degrees(architecture)}
        tp, room = min(rooms.items(), key=lambda one: one[1])
        needed = min(longest_prompt + max_new_tokens, longest_sequence(config, architecture))
        if needed > room:
            where = f" under TP {tp}, which engine.adaptive_tp may choose" if len(rooms) > 1 else ""
            without = f", or leave {tp} out of engine.adaptive_tp.degrees" if tp != config.tp else ""
            raise ConfigError(
                f"engine.kv_cache_gib {config.kv_cache_gib} holds {room} tokens{where}, but the longest prompt with "
                f"sampling.max_new_tokens {max_new_tokens} takes {needed}; raise it or lower that{without}"
            )

    def _degrees(self, architecture: Architecture) -> list[int]:
        """The TP degrees that the engine may have: by default of adaptive TP, all that the model can be split into."""
        config = self._config
        if config.adaptive_tp is None:
            return [config.tp]
        others = {*(config.adaptive_tp.degrees or config.divisors)} - {config.tp}
        return [config.tp, *(tp for tp in sorted(others) if tp <= architecture.query_heads)]
