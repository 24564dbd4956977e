"""Pools keep their workers alive, within limits."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from tailrace.cluster.base import Report, WorkerHandle, WorkerSpec
from tailrace.cluster.local import LocalCluster, LocalHandle
from tailrace.cluster.pool import DeathBudget, Pool
from tailrace.cluster.ray import RayCluster
from tailrace.config.cluster import ClusterConfig
from tailrace.errors import ClusterError, ModelError, WorkerDied
from tailrace.events import Event, EventLog
from tests.cluster.conftest import CONFIG, servant
from tests.cluster.hearing import LIMIT_S


class Log:
    """An event log, and its events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._news = asyncio.Event()
        self.log = EventLog(sinks=(self._take,))

    def _take(self, event: Event) -> None:
        self.events.append(event)
        self._news.set()

    def of(self, task: str) -> list[Event]:
        return [event for event in self.events if event.task == task]

    async def until(self, count: int, task: str) -> None:
        """Wait until there are `count` events of `task`."""
        async with asyncio.timeout(LIMIT_S):
            while len(self.of(task)) < count:
                self._news.clear()
                await self._news.wait()


@pytest.fixture
def log() -> Log:
    return Log()


@asynccontextmanager
async def running(pool: Pool) -> AsyncIterator["asyncio.Task[None]"]:
    """Start a pool and run it."""
    await pool.start()
    run = asyncio.create_task(pool.run())
    try:
        async with asyncio.timeout(LIMIT_S):
            yield run
    finally:
        run.cancel()
        await asyncio.wait([run])
        await pool.close()


def servants(count: int, kind: str = "Servant") -> list[WorkerSpec]:
    return [servant(f"rollout-{index}", kind=kind) for index in range(count)]


async def test_a_pool_ends_when_each_worker_has_ended(log: Log) -> None:
    async with LocalCluster(CONFIG) as cluster:
        pool = Pool(cluster, servants(2), CONFIG, log.log, budget=DeathBudget(0))
        async with running(pool) as run:
            assert await pool.call(1, "add", 1, 2) == 3
            await pool.call(0, "stop")
            await pool.call(1, "stop")
            await run
    assert sorted(event.actor for event in log.of("last")) == ["rollout-0", "rollout-1"]
    assert sorted(event.actor for event in log.of("worker_started")) == ["rollout-0", "rollout-1"]


async def test_what_a_worker_has_told_is_passed_on_before_a_call_returns(log: Log) -> None:
    async with LocalCluster(CONFIG) as cluster:
        pool = Pool(cluster, servants(1), CONFIG, log.log, budget=DeathBudget(0))
        async with running(pool):
            await pool.call(0, "add", 1, 2)  # by now the pool reads reports
            for count in range(1, 20):
                await pool.call(0, "tell", "step")
                assert len(log.of("step")) == count


async def test_a_dead_worker_is_replaced_after_its_work_was_given_back(log: Log) -> None:
    given_back: list[tuple[WorkerHandle, int]] = []

    async def give_back(handle: WorkerHandle) -> None:
        given_back.append((handle, len(log.of("worker_started"))))

    async with LocalCluster(CONFIG) as cluster:
        pool = Pool(cluster, servants(2), CONFIG, log.log, budget=DeathBudget(1), on_death=give_back)
        async with running(pool) as run:
            dead = pool.handles[0]
            await dead.kill()
            with pytest.raises(WorkerDied):
                await pool.call(0, "add", 1, 1)
            await log.until(3, "worker_started")
            await pool.call(0, "stop")
            await pool.call(1, "stop")
            await run
    assert given_back == [(dead, 2)]
    (died,) = log.of("worker_died")
    assert (died.actor, died.info) == ("rollout-0", {"pid": dead.pid, "how": "killed"})


async def test_a_worker_is_prepared_before_it_gets_calls_and_so_is_its_replacement(log: Log) -> None:
    prepared: list[WorkerHandle] = []

    async def prepare(handle: WorkerHandle) -> None:
        assert handle not in pool.handles
        assert await handle.call("add", 1, len(prepared)) == 1 + len(prepared)
        prepared.append(handle)

    async with LocalCluster(CONFIG) as cluster:
        pool = Pool(cluster, servants(1), CONFIG, log.log, budget=DeathBudget(1), on_start=prepare)
        async with running(pool) as run:
            assert pool.handles == prepared
            await prepared[0].kill()
            with pytest.raises(WorkerDied):
                await pool.call(0, "add", 1, 1)
            assert await pool.call(0, "add", 1, 2) == 3
            assert pool.handles == prepared[1:]
            await pool.call(0, "stop")
            await run


async def test_a_worker_that_dies_while_it_is_prepared_is_replaced(log: Log) -> None:
    prepared: list[WorkerHandle] = []

    async def prepare(handle: WorkerHandle) -> None:
        prepared.append(handle)
        if len(prepared) == 2:
            await handle.kill()
            await handle.call("add", 1, 1)

    async with LocalCluster(CONFIG) as cluster:
        pool = Pool(cluster, servants(1), CONFIG, log.log, budget=DeathBudget(2), on_start=prepare)
        async with running(pool) as run:
            await prepared[0].kill()
            with pytest.raises(WorkerDied):
                await pool.call(0, "add", 1, 1)
            assert await pool.call(0, "add", 1, 2) == 3
            assert pool.handles == prepared[2:]
            await pool.call(0, "stop")
            await run
    assert len(log.of("worker_died")) == 2


async def test_a_worker_that_cannot_be_prepared_is_not_left(log: Log) -> None:
    prepared: list[WorkerHandle] = []

    async def prepare(handle: WorkerHandle) -> None:
        prepared.append(handle)
        raise ClusterError("no weights")

    async with LocalCluster(CONFIG) as cluster:
        pool = Pool(cluster, servants(1), CONFIG, log.log, budget=DeathBudget(2), on_start=prepare)
        with pytest.raises(ClusterError, match="no weights"):
            await pool.start()
        assert pool.handles == []
        with pytest.raises(WorkerDied):
            await prepared[0].call("add", 1, 1)


async def test_who_was_told_of_a_death_and_calls_again_gets_the_replacement(log: Log) -> None:
    """A call that is repeated must not keep the pool from hearing of the death."""
    async with LocalCluster(CONFIG) as cluster:
        pool = Pool(cluster, servants(1), CONFIG, log.log, budget=DeathBudget(1))
        async with running(pool) as run:
            await pool.handles[0].kill()
            with pytest.raises(WorkerDied):
                await pool.call(0, "add", 1, 1)
            assert await pool.call(0, "add", 1, 2) == 3
            await pool.call(0, "stop")
            await run


async def test_a_call_waits_for_the_replacement(log: Log) -> None:
    released = asyncio.Event()

    async def hold(handle: WorkerHandle) -> None:
        await released.wait()

    async with LocalCluster(CONFIG) as cluster:
        pool = Pool(cluster, servants(1), CONFIG, log.log, budget=DeathBudget(1), on_death=hold)
        async with running(pool) as run:
            await pool.handles[0].kill()
            await log.until(1, "worker_died")
            call = asyncio.create_task(pool.call(0, "add", 2, 2))
            released.set()
            assert await call == 4
            await pool.call(0, "stop")
            await run


async def test_a_call_does_not_wait_for_ever_for_a_replacement(log: Log) -> None:
    async def hold(handle: WorkerHandle) -> None:
        await asyncio.Event().wait()

    config = ClusterConfig(start_limit_s=0.05)
    async with LocalCluster(CONFIG) as cluster:
        pool = Pool(cluster, servants(1), config, log.log, budget=DeathBudget(1), on_death=hold)
        async with running(pool):
            await pool.handles[0].kill()
            await log.until(1, "worker_died")
            with pytest.raises(ClusterError, match=r"rollout-0 died, and was not replaced within 0\.1 s"):
                await pool.call(0, "add", 2, 2)


async def test_one_death_too_many_ends_all_pools_that_share_the_budget(log: Log) -> None:
    budget = DeathBudget(1)
    async with LocalCluster(CONFIG) as cluster:
        first = Pool(cluster, servants(1), CONFIG, log.log, budget=budget)
        second = Pool(cluster, [servant("reward-0")], CONFIG, log.log, budget=budget)
        async with running(first), running(second) as run:
            await first.handles[0].kill()
            await log.until(3, "worker_started")
            await second.handles[0].kill()
            with pytest.raises(ClusterError, match=r"2 workers died within 10 minutes, .*max_deaths is 1; .*reward-0"):
                await run
            with pytest.raises(ClusterError, match="2 workers died"):
                await second.call(0, "add", 1, 1)


async def test_a_pool_without_a_budget_raises_the_first_death(log: Log) -> None:
    async with LocalCluster(CONFIG) as cluster:
        pool = Pool(cluster, [servant("trainer")], CONFIG, log.log, budget=None)
        async with running(pool) as run:
            await pool.handles[0].kill()
            with pytest.raises(WorkerDied, match="trainer"):
                await run
            with pytest.raises(WorkerDied, match="trainer"):
                await pool.call(0, "add", 1, 1)


async def test_nobody_waits_for_a_dead_worker_that_is_not_replaced_even_where_its_burial_was_cut_short(
    log: Log,
) -> None:
    dying = asyncio.Event()

    async def hold(handle: WorkerHandle) -> None:
        dying.set()
        await asyncio.Event().wait()

    async with LocalCluster(CONFIG) as cluster:
        pool = Pool(cluster, [servant("trainer")], CONFIG, log.log, budget=None, on_death=hold)
        async with running(pool) as run:
            await pool.handles[0].kill()
            await dying.wait()
            with pytest.raises(WorkerDied, match="trainer"):
                await pool.call(0, "add", 1, 1)
            run.cancel()
            await asyncio.wait([run])
            with pytest.raises(WorkerDied, match="trainer"):
                await pool.call(0, "add", 1, 1)


async def test_nobody_waits_for_a_worker_that_died_after_the_pool_ran(log: Log) -> None:
    async with LocalCluster(CONFIG) as cluster:
        pool = Pool(cluster, [servant("trainer")], CONFIG, log.log, budget=None)
        async with running(pool) as run:
            run.cancel()
            await asyncio.wait([run])
            await pool.handles[0].kill()
            for _ in range(2):
                with pytest.raises(WorkerDied, match="trainer"):
                    await pool.call(0, "add", 1, 1)


async def test_a_worker_that_cannot_close_keeps_none_of_the_others_from_closing(log: Log) -> None:
    closed: list[str] = []

    class Slow(LocalHandle):
        async def close(self) -> Report:
            if self.name == "rollout-0":
                raise ModelError("not saved")
            for _ in range(10):
                await asyncio.sleep(0)
            closed.append(self.name)
            return await super().close()

    class Cluster(LocalCluster):
        async def start(self, spec: WorkerSpec, on_wait: Callable[[str], None] = print) -> LocalHandle:
            handle = Slow(spec)
            await handle.open(LIMIT_S)
            return handle

    pool = Pool(Cluster(CONFIG), servants(3), CONFIG, log.log, budget=None)
    await pool.start()
    with pytest.raises(ModelError, match="not saved"):
        await pool.close()
    assert closed == ["rollout-1", "rollout-2"]


async def test_a_worker_that_died_before_the_pool_runs_is_replaced(log: Log) -> None:
    async with LocalCluster(CONFIG) as cluster:
        pool = Pool(cluster, servants(1), CONFIG, log.log, budget=DeathBudget(1))
        await pool.start()
        await pool.handles[0].kill()
        run = asyncio.create_task(pool.run())
        await log.until(2, "worker_started")
        await pool.call(0, "stop")
        await run


async def test_an_error_of_a_worker_ends_the_pool_and_replaces_nobody(log: Log) -> None:
    async with LocalCluster(CONFIG) as cluster:
        pool = Pool(cluster, servants(2, "Failing"), CONFIG, log.log, budget=DeathBudget(5))
        async with running(pool) as run:
            with pytest.raises(ModelError, match="cannot go on"):
                await run
    assert not log.of("worker_died")


async def test_of_errors_that_come_together_one_is_told(log: Log) -> None:
    unseen: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unseen.append(context))
    async with LocalCluster(CONFIG) as cluster:
        pool = Pool(cluster, servants(3, "Failing"), CONFIG, log.log, budget=DeathBudget(5))
        async with running(pool) as run:
            with pytest.raises(ModelError, match="cannot go on"):
                await run
    del pool
    gc.collect()
    assert not unseen


async def test_a_worker_that_cannot_open_ends_the_start(log: Log) -> None:
    async with LocalCluster(CONFIG) as cluster:
        pool = Pool(cluster, [*servants(1), servant("rollout-1", kind="Unopened")], CONFIG, log.log, budget=None)
        with pytest.raises(ModelError, match="no weights"):
            await pool.start()


async def test_lines_are_printed_with_the_name_of_the_worker(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    class Talking(LocalHandle):
        async def reports(self):  # type: ignore[no-untyped-def]
            yield Report(lines=("hello", "world"))

    class Cluster(LocalCluster):
        async def start(self, spec: WorkerSpec, on_wait: Callable[[str], None] = print) -> LocalHandle:
            handle = Talking(spec)
            await handle.open(1.0)
            return handle

    pool = Pool(Cluster(CONFIG), servants(1), CONFIG, log.log, budget=None)
    async with running(pool) as run:
        await run
    assert capsys.readouterr().err == "rollout-0: hello\nrollout-0: world\n"


def test_deaths_are_forgotten_after_ten_minutes() -> None:
    now = 0.0
    budget = DeathBudget(1, clock=lambda: now)
    death = WorkerDied.of("rollout-0", 1, "SIGKILL")
    for now in (0.0, 600.0, 1200.0):  # noqa: B007  (the clock reads it)
        budget.spend(death)
    with pytest.raises(ClusterError, match="2 workers died"):
        budget.spend(death)


async def test_on_ray_a_killed_worker_is_replaced_by_another_process(
    ray_cluster: RayCluster, log: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = Pool(ray_cluster, servants(1), CONFIG, log.log, budget=DeathBudget(1))
    async with running(pool) as run:
        before = pool.handles[0].pid
        with pytest.raises(WorkerDied, match="exit code 9"):
            await pool.call(0, "die", 9)
        await log.until(2, "worker_started")
        assert pool.handles[0].pid != before
        assert await pool.call(0, "add", 1, 1) == 2
        await pool.call(0, "stop")
        await run
    assert [event.info["how"] for event in log.of("worker_died")] == ["exit code 9; its last output: last words"]
    assert "rollout-0: last words" in capsys.readouterr().err


async def test_on_ray_what_a_worker_has_told_is_passed_on_before_a_call_returns(
    ray_cluster: RayCluster, log: Log
) -> None:
    pool = Pool(ray_cluster, servants(1), CONFIG, log.log, budget=DeathBudget(0))
    async with running(pool):
        await pool.call(0, "add", 1, 2)
        for count in range(1, 6):
            await pool.call(0, "tell", "step")
            assert len(log.of("step")) == count


async def test_on_ray_what_a_worker_had_told_is_passed_on_before_a_call_says_that_it_died(
    ray_cluster: RayCluster, log: Log
) -> None:
    """The death may end the run, and with it the reading of reports."""
    pool = Pool(ray_cluster, servants(1), CONFIG, log.log, budget=DeathBudget(1))
    async with running(pool) as run:
        await pool.call(0, "tell", "told")
        with pytest.raises(WorkerDied):
            await pool.call(0, "die", 9)
        assert len(log.of("told")) == 1
        await pool.call(0, "stop")
        await run


async def test_a_worker_that_is_added_is_tended_and_one_that_is_removed_is_not_replaced(log: Log) -> None:
    async with LocalCluster(CONFIG) as cluster:
        pool = Pool(cluster, servants(1), CONFIG, log.log, budget=DeathBudget(1))
        async with running(pool) as run:
            index = await pool.add(servant("rollout-1"))
            assert await pool.call(index, "add", 1, 2) == 3
            await cluster.handles[-1].kill()
            await log.until(3, "worker_started")
            assert await pool.call(index, "add", 1, 2) == 3, "the one in its place"
            await pool.remove(index)
            assert [handle.name for handle in pool.handles] == ["rollout-0"]
            await pool.call(0, "stop")
            await run
    assert len(log.of("worker_died")) == 1
    assert sorted(event.actor for event in log.of("last")) == ["rollout-0"]


async def test_a_worker_that_cannot_start_is_not_added(log: Log) -> None:
    async with LocalCluster(CONFIG) as cluster:
        pool = Pool(cluster, servants(1), CONFIG, log.log, budget=DeathBudget(0))
        async with running(pool) as run:
            with pytest.raises(ModelError):
                await pool.add(servant("rollout-1", kind="Unopened"))
            assert await pool.call(0, "add", 1, 2) == 3
            await pool.call(0, "stop")
            await run


async def test_a_worker_by_itself_is_not_its_replacement(log: Log) -> None:
    async with LocalCluster(CONFIG) as cluster:
        pool = Pool(cluster, servants(1), CONFIG, log.log, budget=DeathBudget(1))
        async with running(pool):
            first = await pool.worker(0)
            assert await first.call("add", 1, 2) == 3
            await cluster.handles[0].kill()
            await log.until(2, "worker_started")
            with pytest.raises(WorkerDied):
                await first.call("add", 1, 2)
            assert await (await pool.worker(0)).call("add", 1, 2) == 3
