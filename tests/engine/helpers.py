"""Requests, and ways to run them, for the engine's tests."""

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tailrace.config.engine import NativeEngineConfig, SamplingConfig
from tailrace.engine.core import EngineCore
from tailrace.types import Request, Sample

TINY_GIB = {
    "llama": 2 * 2 * 2 * 16 * 4 / 2**30,
    "qwen2": 2 * 2 * 2 * 16 * 4 / 2**30,
    "qwen3": 2 * 2 * 2 * 24 * 4 / 2**30,
}
"""Of one cached token of a tiny model in fp32."""


def make_request(request_id: int, *, group_id: int | None = None, prompt: int = 9, **sampling: Any) -> Request:
    """A request whose prompt of `prompt` tokens is decided by its group."""
    group_id = request_id if group_id is None else group_id
    return Request(
        request_id=request_id,
        group_id=group_id,
        prompt_ids=np.random.default_rng(group_id).integers(5, 261, prompt),
        sampling=SamplingConfig(**{"max_new_tokens": 8, **sampling}),
        seed=1000 + request_id,
    )


def make_core(model_dir: Path, **config: Any) -> EngineCore:
    settings = {"dtype": "float32", "block_size": 4, "kv_cache_gib": 0.01, **config}
    return EngineCore(NativeEngineConfig(**settings), model_dir, device=torch.device("cpu"))


def run_core(core: EngineCore, requests: Sequence[Request], *, stagger: bool = False) -> dict[int, Sample]:
    """The samples of `requests`; `stagger` adds one in each step."""
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


async def collect(stream: AsyncIterator[Sample]) -> dict[int, Sample]:
    return {sample.request_id: sample async for sample in stream}


def same_tokens(one: dict[int, Sample], other: dict[int, Sample]) -> bool:
    return {i: s.response_ids.tolist() for i, s in one.items()} == {
        i: s.response_ids.tolist() for i, s in other.items()
    }


TinyModel = Callable[..., Path]
