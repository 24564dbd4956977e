"""The contract of workers, whatever cluster runs them."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tailrace.cluster.base import CANCEL_LIMIT_S, Cluster
from tailrace.errors import ModelError, WorkerDied, WorkerError
from tests.cluster.conftest import servant
from tests.cluster.hearing import LIMIT_S, Hearing


async def test_a_started_worker_is_open_and_tells_facts(cluster: Cluster) -> None:
    handle = await cluster.start(servant())
    assert handle.name == "rollout-0"
    assert handle.facts["settings"] == "settings"
    assert handle.facts["pid"] == handle.pid
    assert {"host", "address", "node", "keeper", "datacentre", "cores"} <= set(handle.facts)
    assert handle.facts["datacentre"] == cluster.datacentre == ""


async def test_a_call_returns_the_result_of_a_command(cluster: Cluster) -> None:
    handle = await cluster.start(servant())
    assert await handle.call("add", 2, 3) == 5


async def test_calls_run_beside_one_another(cluster: Cluster) -> None:
    handle = await cluster.start(servant())
    waiting = asyncio.create_task(handle.call("stopped_by_now"))
    await handle.call("stop")
    assert await asyncio.wait_for(waiting, LIMIT_S)


async def test_an_error_is_told_in_one_line_and_one_of_tailrace_keeps_its_type(cluster: Cluster) -> None:
    handle = await cluster.start(servant())
    with pytest.raises(ModelError, match="no such model"):
        await handle.call("fail", "ours")
    with pytest.raises(WorkerError, match="worker rollout-0: UserModelError: 7B: no such model"):
        await handle.call("fail", "a user's")
    with pytest.raises(WorkerError, match="worker rollout-0: KeyError: 'colour'"):
        await handle.call("fail", "another")
    with pytest.raises(WorkerError) as failed:
        await handle.call("fail", "in lines")
    assert str(failed.value) == "worker rollout-0: ValueError: one two"
    with pytest.raises(WorkerError, match="worker rollout-0 cancelled itself"):
        await handle.call("cancel_itself")


async def test_what_is_no_command_cannot_be_called(cluster: Cluster) -> None:
    handle = await cluster.start(servant())
    for method in ("unknown", "run", "close", "_emit"):
        with pytest.raises(WorkerError, match=f"Servant has no command '{method}'"):
            await handle.call(method)


async def test_a_cancelled_call_has_ended_in_the_worker(cluster: Cluster) -> None:
    handle = await cluster.start(servant())
    call = asyncio.create_task(handle.call("linger", "a"))
    await handle.call("has_begun", "a")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await handle.call("whose_ended") == ["a"]


async def test_a_call_that_is_cancelled_at_once_has_ended_soon(cluster: Cluster) -> None:
    handle = await cluster.start(servant())
    for turns in range(3):
        call = asyncio.create_task(handle.call("linger", "a"))
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
        done, _ = await asyncio.wait([call], timeout=CANCEL_LIMIT_S / 2)
        assert done == {call}
        assert call.cancelled()
    assert await handle.call("add", 1, 1) == 2


async def test_events_arrive_in_order_and_the_last_ones_before_the_end(cluster: Cluster) -> None:
    handle = await cluster.start(servant())
    async with Hearing(handle) as hearing:
        await handle.call("tell", "a", "b")
        await hearing.until(lambda heard: heard.tasks == ["a", "b"])
        await handle.call("stop")
        await hearing.end()
    assert hearing.tasks == ["a", "b", "last"]


async def test_a_handle_knows_what_its_worker_had_told_when_a_call_returned(cluster: Cluster) -> None:
    handle = await cluster.start(servant())
    async with Hearing(handle) as hearing:
        await handle.call("tell", "a", "b")
        assert handle.told == 2
        await handle.call("tell", "c")
        assert handle.told == 3
        await hearing.until(lambda heard: heard.tasks == ["a", "b", "c"])
        await handle.call("stop")
        await hearing.end()


async def test_a_worker_that_does_nothing_is_heard_of(cluster: Cluster) -> None:
    async with Hearing(await cluster.start(servant())) as hearing:
        await hearing.until(lambda heard: heard.reports >= 2)


async def test_a_worker_can_be_called_when_its_run_has_returned(cluster: Cluster) -> None:
    handle = await cluster.start(servant())
    async with Hearing(handle) as hearing:
        await handle.call("stop")
        await hearing.end()
    assert await handle.call("add", 1, 1) == 2


async def test_an_error_of_run_ends_the_reports(cluster: Cluster) -> None:
    async with Hearing(await cluster.start(servant(kind="Failing"))) as hearing:
        with pytest.raises(ModelError, match="cannot go on"):
            await hearing.end()


async def test_an_error_of_open_is_raised_by_start(cluster: Cluster) -> None:
    with pytest.raises(ModelError, match="no weights"):
        await cluster.start(servant(kind="Unopened"))


async def test_a_worker_whose_open_has_failed_is_closed(cluster: Cluster, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    with pytest.raises(ModelError, match="no weights"):
        await cluster.start(replace(servant(kind="Marking"), settings=bytes(closed)))
    assert closed.exists()


async def test_an_error_of_a_close_after_a_failed_open_is_a_note(cluster: Cluster, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere" / "closed"
    with pytest.raises(ModelError, match="no weights") as raised:
        await cluster.start(replace(servant(kind="Marking"), settings=bytes(nowhere)))
    assert any("Then worker rollout-0 could not close: worker" in note for note in raised.value.__notes__)


async def test_a_factory_that_is_not_there_is_told_of(cluster: Cluster) -> None:
    with pytest.raises(WorkerError, match=r"AttributeError: .* has no attribute 'Nobody'"):
        await cluster.start(servant(kind="Nobody"))


async def test_run_is_cancelled_when_nobody_reads_its_reports(cluster: Cluster) -> None:
    handle = await cluster.start(servant())
    async with Hearing(handle) as hearing:
        await hearing.until(lambda heard: heard.reports > 0)
    async with asyncio.timeout(LIMIT_S):
        await handle.call("run_has_ended")


@pytest.mark.parametrize("method", ["linger", "commit"])
async def test_a_killed_worker_has_died_for_reports_and_calls(cluster: Cluster, method: str) -> None:
    handle = await cluster.start(servant())
    async with Hearing(handle) as hearing:
        call = asyncio.create_task(handle.call(method, "a"))
        await handle.call("has_begun", "a")
        await handle.kill()
        for ending in (call, hearing.ended, asyncio.create_task(handle.call("add", 1, 1))):
            with pytest.raises(WorkerDied, match=r"worker rollout-0 \(process \d+\) died: killed"):
                await asyncio.wait_for(ending, LIMIT_S)
    await handle.kill()


async def test_a_closed_worker_is_gone(cluster: Cluster) -> None:
    handle = await cluster.start(servant())
    await handle.close()
    await handle.close()
    with pytest.raises(WorkerDied, match="closed"):
        await handle.call("add", 1, 1)


async def test_events_since_the_end_of_the_reports_come_with_the_close(cluster: Cluster) -> None:
    handle = await cluster.start(servant())
    async with Hearing(handle) as hearing:
        await handle.call("stop")
        await hearing.end()
    await handle.call("tell", "late")
    assert [event.task for event in (await handle.close()).events] == ["late"]


async def test_an_error_of_close_is_raised_by_close(cluster: Cluster) -> None:
    handle = await cluster.start(servant(kind="Unclosed"))
    with pytest.raises(ModelError, match="not saved"):
        await handle.close()
