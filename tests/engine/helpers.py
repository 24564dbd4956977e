"""Tiny engine cores, and a way to run them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tailrace.config.engine import NativeEngineConfig
from tailrace.engine.core import EngineCore
from tailrace.types import Request, Sample

TINY_GIB = {
    "llama": 2 * 2 * 2 * 16 * 4 / 2**30,
    "qwen2": 2 * 2 * 2 * 16 * 4 / 2**30,
    "qwen3": 2 * 2 * 2 * 24 * 4 / 2**30,
}
"""The GiB of one cached token of a tiny model in fp32, by model family."""


def make_core(model_dir: Path, **config: Any) -> EngineCore:
    """Make a core of this section `engine`, on `config["device"]` or a CPU."""
    settings = {"dtype": "float32", "block_size": 4, "kv_cache_gib": 0.01, **config}
    device = torch.device(settings.pop("device", "cpu"))
    return EngineCore(NativeEngineConfig(**settings), model_dir, device=device)


def run_core(core: EngineCore, requests: Sequence[Request], *, stagger: bool = False) -> dict[int, Sample]:
    """Run `requests` and return their samples by request id. `stagger`: make a step after each request is added."""
    samples = []
    for request in requests:
        core.check(request)
        core.add(request)
        if stagger:
            samples += core.step()
    while core.has_work:
        assert core.stats().steps < 2000, "the core does not finish"
        samples += core.step()
    return {sample.request_id: sample for sample in samples}


TinyModel = Callable[..., Path]
