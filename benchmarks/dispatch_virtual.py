"""Generates steps of a workload on engines in virtual time, under several ways to dispatch prompts.

    python benchmarks/dispatch_virtual.py [--engines 16] [--slots 256] [--groups 512] [--steps 3] [WORKLOAD …]

The service, its policies and predictors are the real ones. Engines take the time of `h100_steps.json` for a step. The
last line is JSON: for each workload the generation seconds of each arm, as parts of those of random dispatch.
"""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer

from tailrace.activity import Activity
from tailrace.config.engine import SamplingConfig
from tailrace.config.rollout import DispatchConfig, Order, Policy
from tailrace.engine.timed import TimedEngine
from tailrace.events import EventLog
from tailrace.host.virtual_loop import VirtualLoop
from tailrace.planning.dispatch.factory import make_policy
from tailrace.planning.latency import LatencyPredictor, StepTimes
from tailrace.planning.lengths.base import Asked, Expectation, LengthPredictor
from tailrace.planning.lengths.history import Siblings
from tailrace.planning.lengths.oracle import Oracle
from tailrace.planning.remaining import LengthHistory
from tailrace.planning.tp_profile import DecodePoint, PrefillPoint, ProfileKey, TPProfile
from tailrace.rollout.base import EngineFacts
from tailrace.rollout.foresight import Foresight
from tailrace.rollout.local import LocalPort
from tailrace.rollout.service import GenerationService
from tailrace.types import IntArray, Request
from tailrace.workloads.replay import Replay, Script
from tailrace.workloads.samplers.factory import library, open_workload

PROFILES = Path(__file__).with_name("h100_steps.json")
MODELS = {
    "code-14b": "14b",
    "math-235b": "235b",
    "math-32b": "32b",
    "search-7b": "8b",
    "tool-use-235b": "235b",
    "video-7b": "8b",
}
"""The model in `h100_steps.json` that is nearest to that of each workload."""


class Told(Oracle):
    """Expects of all responses to a prompt what it is told: their mean, the most that a prompt can tell, or less."""

    name = "told"
    tells_samples_apart = False

    def __init__(self, deviation: float = 0.0) -> None:
        """`deviation`: of log-lengths from what is told."""
        self._deviation = deviation

    def expect(self, prompts: Sequence[Asked]) -> list[Expectation]:
        """See `LengthPredictor`."""
        return [Expectation.of(math.log(prompt.forced or 1), self._deviation) for prompt in prompts]


class PromptReplay(Replay):
    """A replay of prompts whose lengths were foretold before."""

    def __init__(self, groups: Sequence[Sequence[Script]], foretold: Sequence[int], deviation: float) -> None:
        """`foretold`: [groups] tokens. `deviation`: of log-lengths from these."""
        super().__init__(groups)
        self.foretold = foretold
        self.deviation = deviation


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A way to dispatch."""

    policy: Policy
    lengths: Callable[[], LengthPredictor] | None = None
    told: Literal["own", "mean", "foretold"] = "own"
    """What the predictor may know of a response: its length, the mean of its group, or what was foretold of that."""
    order: Order = "first_in"
    moves: bool = True
    """Whether responses that run go on elsewhere."""


ARMS = {
    "random": Arm(policy="random"),
    "pull": Arm(policy="pull"),
    "pull_lpt": Arm(policy="pull", lengths=Oracle, order="longest_first"),
    "streamrl_ceiling": Arm(policy="streamrl", lengths=Told, told="mean", order="longest_first"),
    "skewness_siblings": Arm(policy="skewness_aware", lengths=Siblings, order="longest_first"),
    "skewness_ceiling": Arm(policy="skewness_aware", lengths=Told, told="mean", order="longest_first"),
    "oracle_unmoved": Arm(policy="skewness_aware", lengths=Oracle, order="longest_first", moves=False),
    "oracle": Arm(policy="skewness_aware", lengths=Oracle, order="longest_first"),
}


def read_profile(model: str) -> tuple[StepTimes, int, int]:
    """The step times of a model on H100, its TP degree, and the tokens that its cache holds."""
    found: Mapping[str, Any] = json.loads(PROFILES.read_text())[model]
    tp = found["tp"]
    key = ProfileKey(
        model=found["model"],
        architecture={},
        dtype="bfloat16",
        ranks=tp,
        threads_per_rank=1,
        hardware="H100",
        cores=1,
        backend="vllm",
        collectives="nccl",
    )
    decode = tuple(
        DecodePoint(tp=tp, replicas=1, batch_size=size, context_tokens=tokens, seconds=seconds)
        for size, tokens, seconds in found["decode"]
    )
    prefill = tuple(
        PrefillPoint(tp=tp, batch_size=1, length=tokens, seconds=seconds) for tokens, seconds in found["prefill"]
    )
    profile = TPProfile(
        key=key,
        created="",
        tailrace="",
        token_budget=max(tokens for _, tokens, _ in found["decode"]),
        decode=decode,
        prefill=prefill,
        group_s={tp: 1.0} if tp > 1 else {},  # no switch is planned here
    )
    return LatencyPredictor(profile), tp, found["cache_tokens"]


@dataclass(frozen=True, slots=True)
class Paced:
    """The step times of an engine that takes `pace` times as long."""

    times: StepTimes
    pace: float

    def step_s(
        self, tp: int, batch_size: float, context_tokens: float, replicas: int, others: float | None = None
    ) -> float:
        """See `StepTimes`."""
        return self.pace * self.times.step_s(tp, batch_size, context_tokens, replicas, others)

    def prefill_s(self, tp: int, batch_size: float, rms_length: float) -> float:
        """See `StepTimes`."""
        return self.pace * self.times.prefill_s(tp, batch_size, rms_length)


def with_model(deviation: float) -> Arm:
    """The arm of a predictor that has foretold the lengths of a `PromptReplay`."""
    return Arm(policy="skewness_aware", lengths=partial(Told, deviation), told="foretold", order="longest_first")


def requests_of(arm: Arm, replay: Replay, step: int, groups: int) -> tuple[list[Request], list[Asked]]:
    """The requests of a step, and what the arm is told of each."""
    requests: list[Request] = []
    asked: list[Asked] = []
    for group in range(step * groups, (step + 1) * groups):
        scripts = replay.groups[group]
        told = None
        if arm.told == "mean":
            told = round(np.mean([script.tokens for script in scripts]))
        elif arm.told == "foretold":
            assert isinstance(replay, PromptReplay)
            told = replay.foretold[group]
        for number, script in enumerate(scripts):
            requests.append(
                Request(
                    request_id=len(requests),
                    group_id=group,
                    number=number,
                    prompt_ids=np.zeros(script.prompt_tokens, np.int64),
                    sampling=SamplingConfig(max_new_tokens=script.tokens, ignore_eos=True),
                    seed=0,
                )
            )
            asked.append(Asked(prompt_id=str(group), prompt_tokens=script.prompt_tokens, forced=told or script.tokens))
    return requests, asked


def foresight_of(arm: Arm, samples_per_step: int) -> Foresight | None:
    """What an arm expects; None where it expects nothing. It never falls back."""
    if arm.lengths is None:
        return None
    history = LengthHistory()
    config = DispatchConfig(policy=arm.policy, least_gain=0.0, check_every=10**6)
    policy = make_policy(config, history, seed=1)
    log = EventLog(sinks=())
    return Foresight(arm.lengths(), policy, config, history, log, samples_per_step=samples_per_step)


def zeros(request: Request) -> IntArray:
    """A response as long as it was asked for."""
    return np.zeros(request.sampling.max_new_tokens, np.int8)


@asynccontextmanager
async def serving(
    arm: Arm, replay: Replay, *, engines: int, slots: int, groups: int, model: str, paces: Sequence[float] = ()
) -> AsyncIterator[tuple[GenerationService, list[TimedEngine]]]:
    """Yield a service that is ready for the steps of a replay, and its engines.

    `paces`: by engine, the factor on the seconds of its steps; without them all are alike.
    """
    times, tp, cache_tokens = read_profile(model)
    log = EventLog(sinks=())
    made = [
        TimedEngine(Paced(times, pace), slots=slots, cache_tokens=cache_tokens, tp=tp, tokens_of=zeros)
        for pace in paces or [1.0] * engines
    ]
    group_size = len(replay.groups[0])
    facts = EngineFacts(room=slots + group_size, continues=arm.moves)
    ports = [
        LocalPort(engine, facts, log=log, activity=Activity(log, "engine"), name=f"rollout-{number}")
        for number, engine in enumerate(made)
    ]
    policy = make_policy(DispatchConfig(policy=arm.policy), LengthHistory(), seed=1)
    foresight = foresight_of(arm, groups * group_size)
    service = GenerationService(ports, policy, foresight=foresight, order=arm.order)
    for port, engine in zip(service._engines, made, strict=True):
        port.load = engine.load()
    running = asyncio.create_task(service.run())
    await asyncio.sleep(1)  # all engines are ready
    yield service, made
    running.cancel()


async def generate(service: GenerationService, arm: Arm, replay: Replay, step: int, groups: int) -> float:
    """Generate a step of a replay, and return its seconds."""
    requests, asked = requests_of(arm, replay, step, groups)
    start = asyncio.get_running_loop().time()
    async for _ in service.generate(requests, step=step, asked=asked):
        pass
    return asyncio.get_running_loop().time() - start


async def step_seconds(arm: Arm, replay: Replay, *, engines: int, slots: int, groups: int, model: str) -> list[float]:
    """Seconds of each step of a replay."""
    async with serving(arm, replay, engines=engines, slots=slots, groups=groups, model=model) as (service, _):
        steps = range(len(replay.groups) // groups)
        return [await generate(service, arm, replay, step, groups) for step in steps]


def compare(
    workload: str, *, engines: int, slots: int, groups: int, group_size: int, steps: int, arms: Sequence[str]
) -> dict[str, float]:
    """The seconds of each arm as a part of those of random dispatch; the mean of the steps."""
    trace = open_workload(workload).sample(steps=steps, groups=groups, group_size=group_size, seed=0)
    chosen = {name: ARMS[name] for name in arms}
    return play(Replay.of(trace), chosen, engines=engines, slots=slots, groups=groups, model=MODELS[workload])


def play(
    replay: Replay, arms: Mapping[str, Arm], *, engines: int, slots: int, groups: int, model: str
) -> dict[str, float]:
    """See `compare`; random is one of the arms."""
    found: dict[str, float] = {}
    for name, arm in arms.items():
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            each = step_seconds(arm, replay, engines=engines, slots=slots, groups=groups, model=model)
            found[name] = float(np.mean(runner.run(each)))
    return {name: round(seconds / found["random"], 4) for name, seconds in found.items()} | {
        "random_s": round(found["random"], 1)
    }


def main(
    workloads: Annotated[list[str] | None, typer.Argument()] = None,
    engines: int = 16,
    slots: int = 256,
    groups: int = 512,
    group_size: int = 8,
    steps: int = 3,
) -> None:
    """Compare all arms on each workload."""
    found = {}
    for workload in workloads or library():
        found[workload] = compare(
            workload,
            engines=engines,
            slots=slots,
            groups=groups,
            group_size=group_size,
            steps=steps,
            arms=list(ARMS),
        )
        print(workload, found[workload], flush=True)
    print(json.dumps({"sixteen_engines": found}))


if __name__ == "__main__":
    typer.run(main)
