"""Generates the same steps on two real engines of one core each, under several ways to dispatch prompts, in turns.

    python benchmarks/dispatch_real.py [--rounds 8] [--groups 16] [--slots 16] [--longest 512]

Lengths are drawn from the workload math-32b, which is fitted to DAPO's mathematics, and scaled so that the longest has
`longest` tokens. The model is SmolLM2-135M; each engine decodes `slots` sequences together. In each round all arms
generate one and the same step, in an order that changes. The last line is JSON: the median over rounds of each arm's
seconds, as parts of those of random dispatch in the same round.
"""

import asyncio
import json
import logging
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import typer
from dispatch_virtual import ARMS, Arm, foresight_of, requests_of

from tailrace.cluster.factory import make_cluster
from tailrace.cluster.pool import DeathBudget, Pool
from tailrace.config.cluster import ClusterConfig, PoolConfig
from tailrace.config.engine import NativeEngineConfig
from tailrace.config.generate import ServeConfig
from tailrace.config.model import ModelConfig
from tailrace.config.rollout import DispatchConfig
from tailrace.events import EventLog
from tailrace.models.resolve import resolve_model
from tailrace.planning.dispatch.factory import make_policy
from tailrace.planning.remaining import LengthHistory
from tailrace.rollout.service import GenerationService
from tailrace.run.generation import RemotePort
from tailrace.run.workers.engine import engine_worker
from tailrace.workloads.replay import Replay
from tailrace.workloads.samplers.factory import open_workload

LONGEST = 512
"""Tokens of the longest response."""
SHARES = ("random", "pull", "pull_lpt", "skewness_siblings", "skewness_ceiling", "oracle")


def scripts(groups: int, rounds: int, longest: int) -> Replay:
    """The lengths of all rounds, and of one more to warm up."""
    trace = open_workload("math-32b").sample(steps=rounds + 1, groups=groups, group_size=8, seed=1)
    replay = Replay.of(trace)
    most = max(script.tokens for group in replay.groups for script in group)
    return replay.map(lambda script: script.scaled(longest / most))


class Contest:
    """Two engines, and what each arm has learned so far."""

    def __init__(self, ports: Sequence[RemotePort], arms: Mapping[str, Arm], samples: int) -> None:
        self._ports = ports
        self._arms = arms
        self._foresights = {name: foresight_of(arm, samples) for name, arm in arms.items()}

    async def seconds(self, name: str, replay: Replay, step: int, groups: int) -> float:
        """Seconds in which an arm generates a step."""
        arm = self._arms[name]
        policy = make_policy(DispatchConfig(policy=arm.policy), LengthHistory(), seed=step)
        service = GenerationService(self._ports, policy, foresight=self._foresights[name], order=arm.order)
        requests, asked = requests_of(arm, replay, step, groups)
        chance = np.random.default_rng(step)
        requests = [
            replace(request, prompt_ids=chance.integers(100, 40_000, len(request.prompt_ids))) for request in requests
        ]
        prompts = {request.group_id: request.prompt_ids for request in requests}
        requests = [replace(request, prompt_ids=prompts[request.group_id]) for request in requests]
        serving = asyncio.create_task(service.run())
        while any(engine.facts is None for engine in service._engines):
            await asyncio.sleep(0.01)
        start = time.perf_counter()
        async for _ in service.generate(requests, step=step, asked=asked):
            pass
        seconds = time.perf_counter() - start
        serving.cancel()
        await asyncio.wait([serving])
        return seconds


@asynccontextmanager
async def two_ports(slots: int) -> AsyncIterator[Sequence[RemotePort]]:
    """Yield the ports of two engines that have a process and a core each."""
    model = resolve_model(ModelConfig())
    config = ServeConfig(engine=NativeEngineConfig(max_batch_size=slots), threads=1)
    pools = [PoolConfig(cpus=0, threads=1, cores=(core,)) for core in (0, 1)]
    specs = [engine_worker(f"rollout-{number}", pool, config, model) for number, pool in enumerate(pools)]
    cluster_config = ClusterConfig()
    async with make_cluster(cluster_config, {"rollout": pools[0]}) as cluster:
        pool = Pool(cluster, specs, cluster_config, EventLog(sinks=()), budget=DeathBudget(0))
        await pool.start()
        tending = asyncio.create_task(pool.run())
        yield [RemotePort(pool, index, name) for index, name in enumerate(pool.names)]
        tending.cancel()
        await asyncio.wait([tending])
        await pool.close()


async def contest(replay: Replay, arms: Mapping[str, Arm], *, groups: int, slots: int) -> dict[str, list[float]]:
    """Seconds of each arm in each round. The first `groups` of the replay are to warm up."""
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    async with two_ports(slots) as ports:
        contestants = Contest(ports, arms, groups * 8)
        for name in arms:
            await contestants.seconds(name, replay, 0, groups)
        for step in range(1, len(replay.groups) // groups):
            order = random.Random(step).sample(list(arms), len(arms))
            for name in order:
                seconds[name].append(await contestants.seconds(name, replay, step, groups))
            print(step, {name: round(seconds[name][-1], 2) for name in arms}, file=sys.stderr, flush=True)
    return seconds


def shares(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median over rounds of each arm's seconds, as parts of those of random dispatch."""
    return {
        name: round(statistics.median(mine / random for mine, random in zip(of, seconds["random"], strict=True)), 4)
        for name, of in seconds.items()
    }


def main(rounds: int = 8, groups: int = 16, slots: int = 16, longest: int = LONGEST) -> None:
    """Play all rounds."""
    logging.getLogger("tailrace").setLevel(logging.ERROR)
    arms = {name: ARMS[name] for name in SHARES}
    seconds = asyncio.run(contest(scripts(groups, rounds, longest), arms, groups=groups, slots=slots))
    print(json.dumps({"two_engines": shares(seconds)}))


if __name__ == "__main__":
    typer.run(main)
