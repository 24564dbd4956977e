"""Tailrace's side of `make bench-engine` and `make bench-gpu`: MODEL_DIR DEVICE ENGINE.

ENGINE is the section `engine` of a recipe as JSON. Every token has its log-probability.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path

import gate
import numpy as np
import torch

from tailrace.config.engine import NativeEngineConfig, SamplingConfig
from tailrace.engine.base import Engine, EngineArgs
from tailrace.engine.factory import make_engine
from tailrace.types import Request


def make_requests(prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Request]:
    """Make a request for each prompt; equal prompts are one group."""
    groups: dict[tuple[int, ...], int] = {}
    sampling = SamplingConfig(max_new_tokens=new_tokens, ignore_eos=True)
    return [
        Request(
            request_id=index,
            group_id=groups.setdefault(tuple(prompt), len(groups)),
            prompt_ids=np.array(prompt, np.int64),
            sampling=sampling,
            seed=index,
        )
        for index, prompt in enumerate(prompts)
    ]


async def run(engine: Engine) -> None:
    """Generate what the benchmark asks for, until it has had enough."""
    for task in gate.turns():
        start = time.perf_counter()
        async with aclosing(engine.submit(make_requests(**task))) as stream:
            tokens = sum([len(sample.response_ids) async for sample in stream])
        gate.done(seconds=time.perf_counter() - start, tokens=tokens)
    await engine.close()


def main(model_dir: Path, device: str, config: NativeEngineConfig) -> None:
    """Run the engine on `device`. On a CPU this process computes with as many threads as a rank."""
    if config.threads_per_rank is not None:
        torch.set_num_threads(config.threads_per_rank)
    with ThreadPoolExecutor(max_workers=1) as executor:
        asyncio.run(run(make_engine(config, EngineArgs(model_dir=model_dir, device=device, executor=executor))))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], NativeEngineConfig.model_validate_json(sys.argv[3]))
