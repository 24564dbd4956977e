"""Whatever engines do, each request is answered once, with its own tokens, and with weights that are new enough."""

import asyncio
from collections import Counter

import pytest

from tailrace.simulator.clock import VirtualLoop
from tests.rollout.world import World, tokens_of

SEEDS = 1000


def played(seed: int) -> World:
    async def play() -> World:
        world = World(seed)
        await world.run()
        return world

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(play())


def check(world: World) -> None:
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
            assert made.start <= made.end
            told = step.told[sample.request_id]
            assert told == sample.response_ids[: len(told)].tolist()


@pytest.mark.parametrize("part", range(4))
def test_each_request_is_answered_once_with_its_own_tokens(part: int) -> None:
    happened: Counter[str] = Counter()
    for seed in range(part, SEEDS, 4):
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
