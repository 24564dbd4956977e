"""How long it takes until a response goes on in another engine: by its keys and values, and by computing it again.

    python benchmarks/dispatch_move.py [--rounds 7]

Two engines of one core each, in processes of their own; the model is SmolLM2-135M. The time is from the order to
withdraw a response until its new engine has made a token of it. The last line is JSON: the median over rounds, in
milliseconds, by the tokens that the response has, its prompt included.
"""

import asyncio
import json
import logging
import statistics
import time
from collections import defaultdict
from dataclasses import replace
from itertools import count

import numpy as np
import typer
from dispatch_real import two_ports

from tailrace.config.engine import SamplingConfig
from tailrace.planning.dispatch.moving import Way
from tailrace.rollout.base import EnginePort, Finished, Parcel
from tailrace.types import Piece, Request, Sample

TOKENS = (256, 1024)
WAYS: tuple[Way, ...] = ("transfer", "recompute")
_ids = count()


async def begin(port: EnginePort, request: Request) -> None:
    """Have an engine make a token of a response, or one more."""
    await port.give([Parcel(requests=(request,), version=0)])
    while True:
        for item in await port.news():
            if isinstance(item, Piece) and item.request_id == request.request_id:
                return


async def withdrawn(port: EnginePort, request_id: int, way: Way) -> Sample:
    """Take a response from an engine."""
    await port.withdraw([request_id], with_cache=way == "transfer")
    while True:
        for item in await port.news():
            if isinstance(item, Finished) and item.sample.request_id == request_id:
                return item.sample


async def move_s(source: EnginePort, target: EnginePort, tokens: int, way: Way) -> float:
    """Seconds of one move."""
    number = next(_ids)
    request = Request(
        request_id=number,
        group_id=number,
        prompt_ids=np.random.default_rng(number).integers(100, 40_000, tokens - 2),
        sampling=SamplingConfig(max_new_tokens=512, ignore_eos=True),
        seed=number,
        streams=True,
    )
    await begin(source, request)
    start = time.perf_counter()
    sample = await withdrawn(source, number, way)
    await begin(target, replace(request, begun=sample))
    seconds = time.perf_counter() - start
    await target.drop([number])
    return seconds


async def measured(rounds: int) -> dict[str, dict[int, float]]:
    """The median milliseconds by way and tokens."""
    seconds: defaultdict[tuple[Way, int], list[float]] = defaultdict(list)
    async with two_ports(slots=16) as (one, other):
        await asyncio.gather(one.ready(), other.ready())
        for number in range(rounds + 1):  # the first one warms up
            for tokens in TOKENS:
                for way in WAYS:
                    taken = await move_s(one, other, tokens, way)
                    if number:
                        seconds[way, tokens].append(taken)
    return {way: {tokens: round(1000 * statistics.median(seconds[way, tokens])) for tokens in TOKENS} for way in WAYS}


def main(rounds: int = 7) -> None:
    """Measure."""
    logging.getLogger("tailrace").setLevel(logging.ERROR)
    print(json.dumps({"move_ms": asyncio.run(measured(rounds))}))


if __name__ == "__main__":
    typer.run(main)
