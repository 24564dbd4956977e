"""The key of a TP profile: the settings that it holds for, and the path where it is kept."""

import hashlib
import os
from pathlib import Path

import msgspec
import torch

from tailrace.config.engine import LinkConfig, NativeEngineConfig
from tailrace.engine.collectives.factory import resolve_collectives
from tailrace.engine.decoder.factory import why_torch
from tailrace.engine.ranks.process import threads_per_rank
from tailrace.host.cache import cache_directory
from tailrace.host.cpu import cpu_name
from tailrace.models.architecture import Architecture
from tailrace.planning.tp_profile import ProfileKey


def profile_key(
    config: NativeEngineConfig, architecture: Architecture, *, model: str, device: torch.device
) -> ProfileKey:
    """Make the key of an engine with this configuration.

    Args:
        model: The model's name, for people.

    Raises:
        ConfigError: the configured collectives or kernels cannot be used here.
    """
    a = architecture
    return ProfileKey(
        model=model,
        architecture={
            "layers": a.layers,
            "hidden_size": a.hidden_size,
            "intermediate_size": a.intermediate_size,
            "query_heads": a.query_heads,
            "kv_heads": a.kv_heads,
            "head_dim": a.head_dim,
            "vocab_size": a.vocab_size,
        },
        dtype=config.dtype,
        ranks=config.ranks,
        threads_per_rank=threads_per_rank(config),
        hardware=torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        cores=os.cpu_count() or 1,
        backend=_backend(config, a, device),
        collectives=resolve_collectives(config, device).collectives,
        link=_link(config.link),
        engines=config.engines_here,
    )


def default_path(key: ProfileKey) -> Path:
    """The path of this key's profile, unless the configuration names another one."""
    compared = msgspec.structs.replace(key, model="")
    digest = hashlib.sha256(msgspec.json.encode(compared, order="deterministic")).hexdigest()[:16]
    return cache_directory() / "tp_profiles" / f"{digest}.json"


def _backend(config: NativeEngineConfig, architecture: Architecture, device: torch.device) -> str:
    if why_torch(config, architecture, config.tp, device=device) is None:
        return "C++ decoder"
    return "torch with CUDA graphs" if config.cuda_graphs else "torch"


def _link(link: LinkConfig | None) -> str:
    return "" if link is None else f"{link.latency_us:g} us + bytes / {link.bandwidth_gib_per_s:g} GiB/s"
