"""Staleness is bounded, and each row is trained on once, in its step, over random schedules of all modes."""

import asyncio
import random

import pytest

from tailrace.host.virtual_loop import VirtualLoop
from tests.helpers.effort import effort
from tests.tasks.schedules import Run, Saved, Schedule, versions

SCHEDULES = effort(2000, 240)
CHUNKS = 4
OBSERVED = effort(60, 20)
RESUMED = effort(80, 20)


def check(run: Run) -> None:
    """Assert all that must hold of every run."""
    schedule = run.schedule
    size = schedule.samples_per_step
    assert sorted(run.actor.trained) == list(range(schedule.steps))
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
    assert all(age <= schedule.max_staleness for age in measured)


def check_evaluations(run: Run) -> None:
    """Assert that each evaluation that was due is there, and wholly of the weights that it is of."""
    assert sorted(run.answers) == [version for version in run.schedule.evaluations if version >= min(run.answers)]
    for version, answers in run.answers.items():
        assert len(answers) == 2 * run.schedule.evaluated
        assert all((answer.sample.weight_versions == version).all() for answer in answers)


def check_order(run: Run) -> None:
    """Assert that the oldest prompts start first, and that the actor claims rows step after step."""
    started = [orders[0] for orders in run.queue.claimed["rollout"]]
    assert started == sorted(started)
    size = run.schedule.samples_per_step
    trained = [order // size for orders in run.queue.claimed["actor"] for order in orders]
    assert trained == sorted(trained)


def check_events(run: Run) -> None:
    """Assert that the event of each response has the first and the last of its weight versions."""
    told = [(event.version, event.info["last_version"]) for event in run.events if event.task == "sample"]
    made_by = [versions(row) for rows in run.actor.trained.values() for row in rows]
    assert sorted(told) == sorted((made[0], made[-1]) for made in made_by)


async def whole(schedule: Schedule) -> None:
    """Check one run from its beginning to its end."""
    run = await gone(schedule)
    check(run)
    check_order(run)
    check_events(run)
    if schedule.evaluations:
        check_evaluations(run)
        assert 0 in run.answers
    assert (await run.queue.stats()).rows == 0


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_schedule_trains_on_anything_staler_than_the_bound_or_waits_for_ever(chunk: int) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        for seed in range(chunk, SCHEDULES, CHUNKS):
            runner.run(whole(Schedule.drawn(seed)))


def test_steps_train_while_an_evaluation_goes_on() -> None:
    overlaps = evaluated = 0
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        for seed in range(OBSERVED):
            run = runner.run(gone(Schedule.drawn(seed)))
            spans = {task: [event for event in run.events if event.task == task] for task in ("evaluation", "actor")}
            evaluated += bool(spans["evaluation"])
            overlaps += any(
                one.start < other.end and other.start < one.end
                for one in spans["evaluation"]
                for other in spans["actor"]
            )
    assert overlaps == evaluated > OBSERVED / 2


async def gone(schedule: Schedule) -> Run:
    """Return a run after its end."""
    run = Run(schedule)
    await run.go()
    return run


async def interrupted(schedule: Schedule, *, save: bool) -> int:
    """Run, cancel at some moments, and go on from what was saved then or the last time before.

    Steps trained after the checkpoint are lost with the process, and trained again. Return how often the run went on
    from a checkpoint.
    """
    chance = random.Random(f"interrupt {schedule.seed}")
    starts: list[Saved] = []
    run = Run(schedule)
    for part in range(1, 5):
        going = asyncio.create_task(run.go(starts[-1] if starts else None))
        await asyncio.wait([going], timeout=chance.uniform(1.0, 80.0 * schedule.slowest_update_s**0.5))
        if going.done() or part == 4:
            await going
            break
        going.cancel()
        await asyncio.wait([going])
        assert going.cancelled()
        if save and run.begun:
            await run.pipeline.save()
        starts += run.checkpointer.saved[-1:]
        kept = starts[-1].state.trained_steps if starts else 0
        trained = {step: rows for step, rows in run.actor.trained.items() if step < kept}
        run = Run(schedule, part)
        run.actor.trained = trained
    check(run)
    if schedule.evaluations:
        check_evaluations(run)
    return len(starts)


@pytest.mark.parametrize("save", [True, False])
def test_interrupted_and_resumed_runs_train_on_every_row_once_within_the_bound(save: bool) -> None:
    starts = 0
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        for seed in range(2000, 2000 + RESUMED):
            starts += runner.run(interrupted(Schedule.drawn(seed), save=save))
    assert starts > RESUMED / 2
