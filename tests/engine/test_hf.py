"""The transformers engine makes a whole response in one step, which ends early if the response is aborted."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tailrace.config.engine import HfEngineConfig
from tailrace.conformance.requests import collect, make_request
from tailrace.engine.backends.hf import HfEngine
from tailrace.engine.base import EngineArgs
from tailrace.engine.scheduling.stopping import StopRule
from tailrace.types import FinishReason
from tests.engine.helpers import TinyModel

LIMIT_S = 60


class Halt:
    """A halt of the current response at its third token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.may_go_on = asyncio.Event(), threading.Event()
        loop, check = asyncio.get_running_loop(), StopRule.check

        def halting(rule: StopRule, token: int, count: int) -> FinishReason | None:
            if count == 3:
                loop.call_soon_threadsafe(self.reached.set)
                assert self.may_go_on.wait(LIMIT_S)
            return check(rule, token, count)

        monkeypatch.setattr(StopRule, "check", halting)


@pytest.fixture
def engine(tiny_model: TinyModel, executor: ThreadPoolExecutor) -> HfEngine:
    return HfEngine(HfEngineConfig(), EngineArgs(model_dir=tiny_model("llama"), device="cpu", executor=executor))


async def test_an_aborted_response_ends_at_its_next_token(engine: HfEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    halt = Halt(monkeypatch)
    async with asyncio.timeout(LIMIT_S):
        stream = engine.submit([make_request(i, max_new_tokens=4 + 300 * (1 - i), ignore_eos=True) for i in range(2)])
        await halt.reached.wait()
        aborting = asyncio.create_task(engine.abort([0]))
        await asyncio.sleep(0)  # the abort is requested, and waits for the response
        halt.may_go_on.set()
        await aborting
        samples = await collect(stream)
        again = await collect(engine.submit([make_request(0, max_new_tokens=5, ignore_eos=True)]))
        await engine.close()
    assert samples[0].finish_reason is FinishReason.ABORT
    assert len(samples[0].response_ids) == len(samples[0].rollout_log_probs) == 3
    assert len(samples[1].response_ids) == 4
    assert len(again[0].response_ids) == 5


async def test_closing_ends_the_response_at_its_next_token(engine: HfEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    halt = Halt(monkeypatch)
    async with asyncio.timeout(LIMIT_S):
        engine.submit([make_request(0, max_new_tokens=300, ignore_eos=True)])
        await halt.reached.wait()
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        halt.may_go_on.set()
        await closing
    assert engine.stats().generated_tokens == 3
