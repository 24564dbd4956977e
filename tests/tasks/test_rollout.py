"""Every admitted row gets a response, and errors of the engine reach the caller."""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailrace.activity import Activity
from tailrace.algorithms.table import ROLLOUT
from tailrace.config.transfer import LocalQueueConfig
from tailrace.engine.backends.fake import FakeEngine, RandomPlaywright, Script
from tailrace.engine.base import SampleStream
from tailrace.errors import EngineError, first_error
from tailrace.events import Event, EventLog
from tailrace.rollout.base import EngineFacts
from tailrace.rollout.gate import WeightsGate
from tailrace.rollout.local import LocalPort
from tailrace.run.generation import Generation
from tailrace.transfer.queue.base import Claim, NewRow
from tailrace.transfer.queue.local.queue import LocalQueue
from tailrace.transfer.queue.policies.first_in import FirstIn
from tailrace.transfer.queue.policies.groups import WholeGroups
from tailrace.transfer.queue.rows.table import QueueTask
from tailrace.types import FinishReason, Request, TaskSpec, WeightVersion
from tests.helpers.runs import small_run
from tests.tasks.schedules import Device
from tests.transfer.virtual_time import virtual_time

SINK = TaskSpec(name="sink", reads=ROLLOUT.writes)


def make_queue(clock: Callable[[], float] = time.monotonic, **options: Any) -> LocalQueue:
    tasks = [QueueTask(ROLLOUT.spec, WholeGroups(2)), QueueTask(SINK, FirstIn(100))]
    return LocalQueue(tasks, LocalQueueConfig(**options), clock=clock)


def make_worker(
    queue: LocalQueue, engine: FakeEngine, log: EventLog, *, room: int | None = None, gate: WeightsGate | None = None
) -> Generation:
    def decode(ids: list[int]) -> str:
        return " ".join(map(str, ids))

    config = small_run(Path("run"), Path("model"), Path("prompts.jsonl"), sampling__max_new_tokens=9)
    port = LocalPort(engine, EngineFacts(room=room), gate=gate, log=log, activity=Activity(log, "engine"))
    return Generation(config, [port], queue, decode, log)


def in_hand(engine: FakeEngine) -> int:
    return engine.stats().waiting + engine.stats().running


def rows(groups: range) -> list[NewRow]:
    return [
        NewRow(
            group_id=group,
            group_size=4,
            order=4 * group + sample,
            cells={"prompt_ids": np.arange(1, 4), "task": "", "seed": 4 * group + sample},
        )
        for group in groups
        for sample in range(4)
    ]


async def test_every_row_gets_its_own_response_and_event(
    log: EventLog, events: list[Event], executor: ThreadPoolExecutor
) -> None:
    queue = make_queue()
    engine = FakeEngine(executor=executor, playwright=RandomPlaywright(50))
    received: dict[int, Mapping[str, Any]] = {}
    async with asyncio.TaskGroup() as running:
        running.create_task(make_worker(queue, engine, log).run())
        await queue.put(rows(range(6)))
        while len(received) < 24:
            claim = await queue.claim("sink")
            received |= {row.order: row.cells for row in claim.rows}
            await queue.ack(claim, {row.id: {} for row in claim.rows})
        await queue.close()
    assert sorted(received) == list(range(24))
    for cells in received.values():
        ids = cells["response_ids"]
        assert isinstance(ids, np.ndarray)
        assert cells["response"] == " ".join(map(str, ids))
        assert {len(ids)} == {len(cells[c]) for c in ("response_mask", "rollout_log_probs", "weight_versions")}
    assert sorted(event.step for event in events if event.task == "sample" and event.step is not None) == sorted(
        order // 8 for order in range(24)
    )
    assert sum(event.samples or 0 for event in events if event.task == "rollout") == 24


@pytest.mark.parametrize(
    ("log_probs", "said"),
    [
        ([-1.0, np.nan], "the log-probability nan; it is finite, and not above 0"),
        ([-1.0, -np.inf], "the log-probability -inf;"),
        ([0.5, -1.0], "the log-probability 0.5;"),
        ([-1.0], "2 tokens, 1 log-probabilities and 2 weight versions"),
    ],
)
async def test_an_engine_whose_log_probabilities_cannot_be_trained_on_is_an_error(
    log: EventLog, executor: ThreadPoolExecutor, log_probs: list[float], said: str
) -> None:
    def play(_: Request) -> Script:
        return Script(response_ids=np.array([5, 6]), log_probs=np.array(log_probs), finish_reason=FinishReason.STOP)

    queue = make_queue()
    await queue.put(rows(range(1, 2)))
    with pytest.raises(ExceptionGroup) as failed:
        await make_worker(queue, FakeEngine(executor=executor, playwright=play), log).run()
    error = first_error(failed.value)
    assert isinstance(error, EngineError)
    assert said in str(error)


class Short(FakeEngine):
    """An engine that leaves out a request."""

    def submit(self, requests: Sequence[Request]) -> SampleStream:
        return super().submit(requests[:-1])


class Generous(FakeEngine):
    """An engine that also gives a sample that it was not asked for."""

    def submit(self, requests: Sequence[Request]) -> SampleStream:
        return super().submit([*requests, replace(requests[0], request_id=99)])


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Short, "the engine ended its stream without samples of 1 of 4 requests"),
        (Generous, "the engine gave a sample of request 99"),
    ],
)
async def test_an_engine_gives_one_sample_of_each_request(
    log: EventLog, executor: ThreadPoolExecutor, kind: type[FakeEngine], said: str
) -> None:
    queue = make_queue()
    await queue.put(rows(range(1)))
    engine = kind(executor=executor, playwright=RandomPlaywright(5))
    with pytest.raises(ExceptionGroup) as failed:
        await make_worker(queue, engine, log).run()
    error = first_error(failed.value)
    assert isinstance(error, EngineError)
    assert said in str(error)


async def test_an_engine_that_answers_with_no_token_is_an_error_that_names_the_sample(
    log: EventLog, executor: ThreadPoolExecutor
) -> None:
    class Silent(FakeEngine):
        def submit(self, requests: Sequence[Request]) -> SampleStream:
            stream = super().submit(requests)
            aborting.append(asyncio.ensure_future(self.abort([requests[0].request_id])))
            return stream

    aborting: list[asyncio.Future[None]] = []
    queue = make_queue()
    engine = Silent(executor=executor, playwright=RandomPlaywright(9))
    await engine.pause_generation()  # the request is aborted before its first token
    await queue.put(rows(range(1, 2)))
    with pytest.raises(ExceptionGroup) as failed:
        await make_worker(queue, engine, log).run()
    error = first_error(failed.value)
    assert isinstance(error, EngineError)
    assert str(error) == (
        "the engine gave sample 4 of the run (group 1) a response without a token; one has at least one, be it the end "
        "of sequence"
    )


async def test_rows_of_two_steps_in_one_claim_wait_for_the_weights_of_their_own(
    log: EventLog, events: list[Event], executor: ThreadPoolExecutor
) -> None:
    class Gate:
        def generating(self, needed: WeightVersion) -> AbstractAsyncContextManager[None]:
            waited.append(needed)
            return nullcontext()

    waited: list[WeightVersion] = []
    queue = make_queue()
    engine = FakeEngine(executor=executor, playwright=RandomPlaywright(9))
    await queue.put(rows(range(1, 3)))  # the last group of step 0, and the first of step 1
    async with asyncio.timeout(20), asyncio.TaskGroup() as running:
        running.create_task(make_worker(queue, engine, log, gate=Gate()).run())
        received: list[int] = []
        while len(received) < 8:
            received += [row.order for row in (await queue.claim("sink")).rows]
        await queue.close()
    assert waited == [0, 1]
    assert sorted(event.step or 0 for event in events if event.task == "sample") == [0] * 4 + [1] * 4


async def test_a_failing_engine_ends_the_worker_and_gives_the_rows_back(
    log: EventLog, executor: ThreadPoolExecutor
) -> None:
    def no_script(request: Request) -> Script:
        raise ArithmeticError("no idea")

    queue = make_queue()
    engine = FakeEngine(executor=executor, playwright=no_script)
    await queue.put(rows(range(1)))
    with pytest.raises(ExceptionGroup) as caught:
        await make_worker(queue, engine, log).run()
    assert caught.group_contains(EngineError, match="no idea")
    assert (await queue.stats()).tasks["rollout"].ready == 4


async def test_a_cancelled_worker_leaves_nothing_in_the_engine(log: EventLog, executor: ThreadPoolExecutor) -> None:
    queue = make_queue()
    engine = FakeEngine(executor=executor, playwright=RandomPlaywright(50))
    await engine.pause_generation()
    worker = asyncio.create_task(make_worker(queue, engine, log).run())
    await queue.put(rows(range(2)))
    while engine.stats().waiting < 8:
        await asyncio.sleep(0)
    worker.cancel()
    with pytest.raises(asyncio.CancelledError):
        await worker
    assert (engine.stats().waiting, engine.stats().running) == (0, 0)
    stats = (await queue.stats()).tasks["rollout"]
    assert (stats.ready, stats.leased) == (8, 0)


@pytest.mark.filterwarnings("ignore:work on a claim")
async def test_rows_that_come_again_while_they_are_generated_get_one_response(
    log: EventLog, events: list[Event], executor: ThreadPoolExecutor
) -> None:
    now = 0.0
    queue = make_queue(lambda: now)
    engine = FakeEngine(executor=executor, playwright=RandomPlaywright(50))
    await engine.pause_generation()
    async with asyncio.TaskGroup() as running:
        running.create_task(make_worker(queue, engine, log).run())
        await queue.put(rows(range(2)))
        while in_hand(engine) < 8:
            await asyncio.sleep(0)
        now = 3600.0
        await queue.nack(Claim(lease_id=0, lease_s=0.0, task="rollout", rows=()))  # the leases have ended
        while in_hand(engine) < 16:
            await asyncio.sleep(0)
        await engine.resume_generation()
        received: list[int] = []
        while len(received) < 8:
            received += [row.order for row in (await queue.claim("sink")).rows]
        await queue.close()
    assert sorted(received) == list(range(8))
    assert in_hand(engine) == 0
    assert len([event for event in events if event.task == "sample"]) == 8
    assert sorted(event.info.get("void", False) for event in events if event.task == "rollout") == [False, True]


async def leased(queue: LocalQueue) -> int:
    return (await queue.stats()).tasks["rollout"].leased


def by_place(tokens: tuple[int, ...]) -> Callable[[Request], Script]:
    """Write responses of these lengths, by the sample's place in its group."""

    def write(request: Request) -> Script:
        length = tokens[request.seed % 4]
        return Script(
            response_ids=np.zeros(length, np.int64),
            log_probs=np.zeros(length, np.float32),
            finish_reason=FinishReason.STOP,
        )

    return write


@pytest.mark.parametrize(("room", "most"), [(3, 4), (4, 4), (7, 4), (8, 8), (None, 24)])
async def test_an_engine_is_given_no_more_rows_than_it_has_room_for_but_always_a_group(
    log: EventLog, executor: ThreadPoolExecutor, room: int | None, most: int
) -> None:
    queue = make_queue()
    engine = FakeEngine(executor=executor, playwright=by_place((1, 1, 1, 1)))
    await engine.pause_generation()
    async with asyncio.timeout(20), asyncio.TaskGroup() as running:
        running.create_task(make_worker(queue, engine, log, room=room).run())
        await queue.put(rows(range(6)))
        while in_hand(engine) < most:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert (in_hand(engine), await leased(queue)) == (most, 24), "the others wait in the service"
        await engine.resume_generation()
        received = 0
        while received < 24:
            received += len((await queue.claim("sink")).rows)
        await queue.close()


async def test_room_is_freed_sample_by_sample(log: EventLog, executor: ThreadPoolExecutor) -> None:
    """There are two groups and room for six: the second is given when two samples of the first are done, not all."""
    queue = make_queue()
    engine = FakeEngine(executor=executor, playwright=by_place((1, 2, 10**6, 10**6)))
    worker = asyncio.create_task(make_worker(queue, engine, log, room=6).run())
    await queue.put(rows(range(2)))
    done: list[int] = []
    async with asyncio.timeout(20):
        while len(done) < 4:
            done += [row.order for row in (await queue.claim("sink")).rows]
    assert sorted(done) == [0, 1, 4, 5]
    worker.cancel()
    with pytest.raises(asyncio.CancelledError):
        await worker


@pytest.mark.filterwarnings("ignore:work on a claim")
async def test_a_claim_that_is_void_frees_all_of_its_room(log: EventLog, executor: ThreadPoolExecutor) -> None:
    now = 0.0
    queue = make_queue(lambda: now)
    engine = FakeEngine(executor=executor, playwright=by_place((1, 9, 9, 9)))
    await engine.pause_generation()
    async with asyncio.timeout(20), asyncio.TaskGroup() as running:
        running.create_task(make_worker(queue, engine, log, room=4).run())
        await queue.put(rows(range(3)))
        while in_hand(engine) < 4:
            await asyncio.sleep(0)
        now = 3600.0
        await queue.nack(Claim(lease_id=0, lease_s=0.0, task="rollout", rows=()))  # the lease has ended
        await engine.resume_generation()
        received: list[int] = []
        while len(received) < 12:
            received += [row.order for row in (await queue.claim("sink")).rows]
        await queue.close()
    assert sorted(received) == list(range(12))


@virtual_time
async def test_a_worker_waits_for_prompts_longer_than_the_limit_of_a_claim(log: EventLog) -> None:
    queue = make_queue(asyncio.get_running_loop().time, timeout_s=5.0)
    engine = FakeEngine(executor=Device(random.Random(0), 1.0), playwright=RandomPlaywright(50))
    worker = asyncio.create_task(make_worker(queue, engine, log).run())
    await asyncio.sleep(1000.0)  # as during a long training step, before which no prompt is admitted
    await queue.put(rows(range(1)))
    received = 0
    while received < 4:
        received += len((await queue.claim("sink", timeout=100.0)).rows)
    await queue.close()
    await worker
