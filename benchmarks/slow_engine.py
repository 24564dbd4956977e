"""How much of two engines' throughput is had where one of them is slowed to half.

    python benchmarks/slow_engine.py [--workload math-32b] [--steps 4]

The service and its policy, pull, are the real ones. Engines take the time of an H100 for a step (`h100_steps.json`), in
virtual time. The last line is JSON:

    slow_engine_share   tokens a second while work waits, over the sum of what each engine makes alone of the same work.
                        Steps come one on the other, as in an asynchronous run, and three quarters of all responses
                        count: at the end no work waits
    slow_engine_step    where each engine has room for a whole step: its seconds over those with equal shares
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import typer
from dispatch_virtual import ARMS, MODELS, Arm, generate, requests_of, serving

from tailrace.host.virtual_loop import VirtualLoop
from tailrace.workloads.replay import Replay
from tailrace.workloads.samplers.factory import open_workload

SLOTS, GROUP_SIZE = 64, 8
BOTH = (1.0, 2.0)
"""The seconds of each engine's steps, over those of the quick one."""
PULL, SHARED_OUT = ARMS["pull"], Arm(policy="round_robin")


def rate(replay: Replay, groups: int, paces: Sequence[float], model: str) -> float:
    """Tokens a second of engines of these paces, until three quarters of the responses to a replay have ended."""
    counted = 3 * GROUP_SIZE * len(replay.groups) // 4

    async def play() -> float:
        loop, ended = asyncio.get_running_loop(), asyncio.Semaphore(0)
        setup: dict[str, Any] = {
            "engines": len(paces),
            "slots": SLOTS,
            "groups": groups,
            "model": model,
            "paces": paces,
        }
        async with serving(PULL, replay, **setup) as (service, engines):
            start = loop.time()

            async def see(step: int) -> None:
                requests, asked = requests_of(PULL, replay, step, groups)
                async for _ in service.generate(requests, step=step, asked=asked):
                    ended.release()

            seeing = [asyncio.create_task(see(step)) for step in range(len(replay.groups) // groups)]
            for _ in range(counted):
                await ended.acquire()
            tokens, seconds = sum(engine.stats().generated_tokens for engine in engines), loop.time() - start
            for task in seeing:
                task.cancel()
            await asyncio.wait(seeing)
            return tokens / seconds

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(play())


def step_s(replay: Replay, arm: Arm, groups: int, model: str) -> float:
    """Seconds of all steps of a replay, one after the other."""

    async def play() -> float:
        setup: dict[str, Any] = {"engines": len(BOTH), "slots": SLOTS, "groups": groups, "model": model, "paces": BOTH}
        async with serving(arm, replay, **setup) as (service, _):
            steps = range(len(replay.groups) // groups)
            return sum([await generate(service, arm, replay, step, groups) for step in steps])

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(play())


def slow_engine(workload: str, steps: int) -> dict[str, float]:
    """Both figures."""
    model = MODELS[workload]

    def drawn(groups: int) -> Replay:
        return Replay.of(open_workload(workload).sample(steps=steps, groups=groups, group_size=GROUP_SIZE, seed=0))

    waiting, fitting = 64, SLOTS // GROUP_SIZE
    alone = sum(rate(drawn(waiting), waiting, (pace,), model) for pace in BOTH)
    together = rate(drawn(waiting), waiting, BOTH, model)
    by_pace, alike = (step_s(drawn(fitting), arm, fitting, model) for arm in (PULL, SHARED_OUT))
    return {"slow_engine_share": round(together / alone, 3), "slow_engine_step": round(by_pace / alike, 3)}


def main(workload: str = "math-32b", steps: int = 4) -> None:
    """Print both figures."""
    print(json.dumps(slow_engine(workload, steps)))


if __name__ == "__main__":
    typer.run(main)
