"""A response moves with its keys and values from one worker process to another, by the ports that a service uses."""

import asyncio
from contextlib import AsyncExitStack, closing
from dataclasses import replace

from tailrace.commands.serve import _ports
from tailrace.config.engine import NativeEngineConfig
from tailrace.config.generate import ServeConfig
from tailrace.conformance.requests import make_request
from tailrace.engine.base import EngineLoad
from tailrace.rollout.base import EnginePort, Finished, Parcel
from tailrace.types import FinishReason, Piece, Request, Sample
from tests.conftest import TinyModel
from tests.engine.helpers import make_core, run_core

LIMIT_S = 120


async def begun_at(port: EnginePort, request: Request, tokens: int) -> Sample:
    """What an engine has made of a request when it is withdrawn after some tokens."""
    await port.give([Parcel(requests=(replace(request, streams=True),), version=0)])
    made = 0
    while made < tokens:
        made += sum(len(item.tokens) for item in await port.news() if isinstance(item, Piece))
    await port.withdraw([request.request_id], with_cache=True)
    return await finished(port)


async def finished(port: EnginePort) -> Sample:
    while True:
        for item in await port.news():
            if isinstance(item, Finished):
                return item.sample
            assert isinstance(item, EngineLoad | Piece)


async def test_keys_and_values_go_from_process_to_process(tiny_model: TinyModel, connected_to_ray: None) -> None:
    request = make_request(0, prompt=40, max_new_tokens=400, ignore_eos=True)
    engine = NativeEngineConfig(dtype="float32", kv_cache_gib=0.01, block_size=4)
    with closing(make_core(tiny_model("llama"))) as core:
        whole = run_core(core, [request])[0]
    async with asyncio.timeout(LIMIT_S), AsyncExitStack() as stack:
        (one, two), _ = await _ports(ServeConfig(engine=engine, device="cpu"), tiny_model("llama"), 2, stack)
        facts = [await port.ready() for port in (one, two)]
        assert facts[0].cache is not None
        assert facts[0].cache == facts[1].cache
        begun = await begun_at(one, request, 5)
        assert begun.finish_reason is FinishReason.ABORT
        assert begun.cache is not None
        assert begun.cache.tokens == 40 + len(begun.response_ids) - 1
        blocks = -(-begun.cache.tokens // 4)
        assert begun.cache.data.nbytes == blocks * 4 * facts[0].cache.token_bytes
        await two.give([Parcel(requests=(replace(request, begun=begun),), version=0)])
        sample = await finished(two)
    assert sample.response_ids.tolist() == whole.response_ids.tolist()
    assert sample.rollout_log_probs.tobytes() == whole.rollout_log_probs.tobytes()
    assert sample.cache is None
