"""The engine by itself, for `make bench-serve`: MODEL_DIR. Clients in its own process submit to it, without HTTP.

A step of so many `clients`, `requests` of each, `prompt_tokens` and `new_tokens` takes `seconds`. Each round, of which
it has the `number`, has other prompts.
"""

import asyncio
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from itertools import count
from pathlib import Path

import gate
import numpy as np

from tailrace.config.engine import NativeEngineConfig, SamplingConfig
from tailrace.engine.base import Engine
from tailrace.engine.opening import open_engine
from tailrace.host.compute import prepare_torch
from tailrace.types import Request

_ids = count()


async def client(engine: Engine, task: dict[str, int], chance: np.random.Generator) -> None:
    """Make some requests, one after the other."""
    sampling = SamplingConfig(max_new_tokens=task["new_tokens"], ignore_eos=True)
    for _ in range(task["requests"]):
        number = next(_ids)
        prompt = chance.integers(100, 40_000, task["prompt_tokens"])
        request = Request(request_id=number, group_id=number, prompt_ids=prompt, sampling=sampling, seed=number)
        async with aclosing(engine.submit([request])) as samples:
            async for _ in samples:
                pass


async def main(model: Path) -> None:
    """Do the steps that the benchmark asks for."""
    prepare_torch("cpu", None)
    loop = asyncio.get_running_loop()
    steps = gate.turns()
    with ThreadPoolExecutor(1) as thread:
        engine = await open_engine(NativeEngineConfig(), model, device="cpu", executor=thread)
        while task := await loop.run_in_executor(None, next, steps, None):
            chance = np.random.default_rng((task["number"], task["clients"]))
            start = time.perf_counter()
            await asyncio.gather(*(client(engine, task, chance) for _ in range(task["clients"])))
            gate.done(seconds=time.perf_counter() - start)
        await engine.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
