"""Behaviour that is specific to workers in the event loop of their driver."""

import asyncio

import pytest

from tailrace.cluster.base import WorkerHandle
from tailrace.cluster.local import LocalCluster
from tailrace.errors import WorkerDied
from tests.cluster.conftest import CONFIG, servant


@pytest.mark.parametrize("turns", range(4))
async def test_a_worker_that_is_killed_just_as_it_is_heard_of_has_died(turns: int) -> None:
    """The worker's `run` may be about to begin, and must not begin any more."""

    async def hear(handle: WorkerHandle) -> None:
        async for _ in handle.reports():
            pass

    async with asyncio.timeout(20), LocalCluster(CONFIG) as cluster:
        handle = await cluster.start(servant())
        hearing = asyncio.create_task(hear(handle))
        for _ in range(turns):
            await asyncio.sleep(0)
        await handle.kill()
        await handle.free()
        with pytest.raises(WorkerDied, match="killed"):
            await hearing


async def test_the_cancellation_of_a_call_that_goes_on_is_waited_for_no_longer_than_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tailrace.cluster.local.CANCEL_LIMIT_S", 0.1)
    async with asyncio.timeout(20), LocalCluster(CONFIG) as cluster:
        handle = await cluster.start(servant())
        call = asyncio.create_task(handle.call("commit", "a"))
        await handle.call("has_begun", "a")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await handle.call("add", 1, 1) == 2


async def test_a_call_ends_though_the_kill_of_its_worker_is_given_up() -> None:
    async with asyncio.timeout(20), LocalCluster(CONFIG) as cluster:
        handle = await cluster.start(servant())
        call = asyncio.create_task(handle.call("commit", "a"))
        await handle.call("has_begun", "a")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await handle.kill()
        with pytest.raises(WorkerDied, match="killed"):
            await call


async def test_workers_open_one_after_another() -> None:
    """Each may load a model with transformers, which changes state of the process meanwhile."""
    async with asyncio.timeout(20), LocalCluster(CONFIG) as cluster:
        workers = [servant(f"rollout-{index}", kind="Alone") for index in range(3)]
        await asyncio.gather(*map(cluster.start, workers))
