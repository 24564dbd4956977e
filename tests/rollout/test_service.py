"""Whatever engines do, each request is answered once, with its own tokens, and with weights that are new enough."""

import asyncio
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from tailrace.activity import Activity
from tailrace.config.engine import SamplingConfig
from tailrace.engine.timed import TimedEngine
from tailrace.events import EventLog
from tailrace.host.virtual_loop import VirtualLoop
from tailrace.planning.dispatch.base import EngineState, Job, Placement, Policy
from tailrace.planning.dispatch.costs import StepCosts
from tailrace.rollout.base import EngineFacts
from tailrace.rollout.local import LocalPort
from tailrace.rollout.service import GenerationService
from tailrace.rollout.streams import Generated
from tailrace.types import Request
from tests.helpers.effort import effort
from tests.rollout.world import World, tokens_of
from tests.transfer.virtual_time import virtual_time

SEEDS, PARTS = effort(1000, 240), effort(4, 1)


def played(seed: int) -> World:
    async def play() -> World:
        world = World(seed)
        await world.run()
        return world

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(play())


def check(world: World) -> None:
    assert not (world.one_version and world.withdrawn), "it would have tokens of two versions"
    for step in world.steps:
        requests = {request.request_id: request for request in step.requests()}
        counted = Counter(made.sample.request_id for made in step.samples)
        assert max(counted.values(), default=0) <= 1, "a sample came twice"
        assert counted.keys() <= requests.keys()
        assert step.closed or counted.keys() == requests.keys()
        for made in step.samples:
            sample, request = made.sample, requests[made.sample.request_id]
            assert sample.group_id == request.group_id
            assert sample.response_ids.tolist() == tokens_of(request).tolist()
            assert len(sample.weight_versions) == len(sample.rollout_log_probs) == len(sample.response_ids)
            assert sample.weight_versions.min() >= step.needed
            assert (np.diff(sample.weight_versions) >= 0).all(), "weights only get newer"
            assert made.start <= made.end
            told = step.told[sample.request_id]
            assert told == sample.response_ids[: len(told)].tolist()


@pytest.mark.parametrize("part", range(PARTS))
def test_each_request_is_answered_once_with_its_own_tokens(part: int) -> None:
    happened: Counter[str] = Counter()
    for seed in range(part, SEEDS, PARTS):
        try:
            world = played(seed)
            check(world)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        happened += world.happened
        happened["withdrawn"] += world.withdrawn
        happened["told"] += sum(len(tokens) for step in world.steps for tokens in step.told.values())
        happened["came"] += world.came
        happened["closed"] += sum(step.closed for step in world.steps)
        happened["checks"] += sum(event.task == "dispatch" for event in world.events)
    for what in ("kill", "add", "remove", "withdrawn", "told", "closed", "checks"):
        assert happened[what] > 20, happened
    for what in ("recompute", "transfer", "came"):
        assert happened[what] > 3, happened


class OneApart:
    """Leaves the first engine to the longest job. It plans, and counts how often it does."""

    name = "one_apart"
    plans = True

    def __init__(self) -> None:
        self.placed = 0

    def place(self, jobs: Sequence[Job], engines: Sequence[EngineState]) -> Placement:
        self.placed += 1
        first = [place for place, job in enumerate(jobs) if job.group == 0]
        return Placement([first, [place for place in range(len(jobs)) if place not in first]], [])


async def generated(
    costs: Sequence[StepCosts], lengths: Sequence[int], *, slots: int, policy: Policy | None = None
) -> list[Generated]:
    """Responses of these lengths, of one prompt each, by engines whose costs are known, named by their places."""
    engines = [TimedEngine(of_one, slots=slots) for of_one in costs]
    service = GenerationService([port_of(engine, str(n), slots) for n, engine in enumerate(engines)], policy)
    for known, engine in zip(service._engines, engines, strict=True):
        known.load = engine.load()
    running = asyncio.create_task(service.run())
    await asyncio.sleep(1)  # all engines are ready
    made = [response async for response in service.generate(requests_of(lengths), step=0)]
    running.cancel()
    await asyncio.wait([running])
    return made


def port_of(engine: TimedEngine, name: str, slots: int) -> LocalPort:
    log, facts = EventLog(sinks=()), EngineFacts(room=slots, continues=False)
    return LocalPort(engine, facts, log=log, activity=Activity(log, "engine"), name=name)


def requests_of(lengths: Sequence[int]) -> list[Request]:
    """Requests of one group each, for responses of these lengths."""
    return [
        Request(
            request_id=number,
            group_id=number,
            prompt_ids=np.zeros(4, np.int64),
            sampling=SamplingConfig(max_new_tokens=length, ignore_eos=True),
            seed=number,
        )
        for number, length in enumerate(lengths)
    ]


@virtual_time
async def test_an_engine_with_room_to_spare_does_not_have_all_planned_anew_with_each_end() -> None:
    responses, policy = 400, OneApart()
    costs = StepCosts(base=0.01, each=0.001, context=0, prefill=0)
    lengths = [100_000, *(5 + number * 13 % 29 for number in range(1, responses))]
    assert len(await generated([costs, costs], lengths, slots=4, policy=policy)) == responses
    assert policy.placed < responses / 3, policy.placed


@virtual_time
async def test_an_engine_that_is_half_as_quick_takes_half_as_many_where_there_is_room_for_all() -> None:
    costs = StepCosts(base=0.01, each=0.01, context=0, prefill=0)
    made = await generated([costs.times(2), costs], [50] * 48, slots=64)
    assert Counter(response.worker for response in made) == {"0": 16, "1": 32}


class Evenly:
    """Plans as many jobs for each engine."""

    name = "evenly"
    plans = True

    def place(self, jobs: Sequence[Job], engines: Sequence[EngineState]) -> Placement:
        return Placement([list(range(first, len(jobs), len(engines))) for first in range(len(engines))], [])


@virtual_time
async def test_an_engine_that_joins_gets_some_of_what_is_planned_for_others() -> None:
    costs = StepCosts(base=0.01, each=0.001, context=0, prefill=0)
    first, late = TimedEngine(costs, slots=4), TimedEngine(costs, slots=4)
    service = GenerationService([port_of(first, "first", 4)], Evenly())
    service._engines[0].load = first.load()
    running = asyncio.create_task(service.run())
    await asyncio.sleep(1)
    stream = service.generate(requests_of([50] * 80), step=0)
    await asyncio.sleep(1)  # all are planned for the one engine that there is
    service.add(port_of(late, "late", 4))
    made = Counter([response.worker async for response in stream])
    assert made["late"] > 20, made
    running.cancel()
    await asyncio.wait([running])
