"""The bound on staleness, and that each row is trained on once in its step, over random schedules of all modes."""

import asyncio
import random
from itertools import pairwise

import pytest

from tests.rollout.schedules import Run, Saved, Schedule, versions
from tests.transfer.virtual_time import VirtualLoop

SCHEDULES = 1000
CHUNKS = 8


def check(run: Run, first_step: int = 0) -> None:
    """All that is claimed of every run."""
    schedule = run.schedule
    size = schedule.samples_per_step
    assert sorted(run.actor.trained) == list(range(first_step, schedule.steps))
    for step, rows in run.actor.trained.items():
        assert [row.order for row in rows] == list(range(step * size, (step + 1) * size))
        for row in rows:
            made_by = versions(row)
            assert made_by == sorted(made_by)
            assert max(0, step - schedule.max_staleness) <= made_by[0]
            assert made_by[-1] <= step
            if schedule.mode in ("delayed", "sub_step"):
                assert made_by[0] == made_by[-1]
    assert not run.actor.unacked
    measured = [event.metrics["staleness_max"] for event in run.events if event.task == "step"]
    assert max(measured) <= schedule.max_staleness


def check_order(run: Run) -> None:
    """The oldest prompts are started first, and no row of a step is claimed for training before the one before."""
    started = [orders[0] for orders in run.queue.claimed["rollout"]]
    assert started == sorted(started)
    size = run.schedule.samples_per_step
    trained = [order // size for orders in run.queue.claimed["actor"] for order in orders]
    assert trained == sorted(trained)


async def whole(schedule: Schedule) -> None:
    """One run, from its beginning to its end."""
    run = Run(schedule)
    await run.go()
    check(run)
    check_order(run)
    assert (await run.queue.stats()).rows == 0


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_schedule_trains_on_anything_staler_than_the_bound_or_waits_for_ever(chunk: int) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        for seed in range(chunk, SCHEDULES, CHUNKS):
            runner.run(whole(Schedule.drawn(seed)))
