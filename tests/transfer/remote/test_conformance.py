"""Every queue refuses bad calls with the same words, and works on afterwards."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import numpy as np
import pytest

from tailrace.config.transfer import LocalQueueConfig
from tailrace.errors import (
    ColumnError,
    GroupExists,
    LeaseError,
    QueueClosed,
    QueueError,
    QueueTimeout,
    StaleRowError,
)
from tailrace.transfer.queue.base import NewRow, RowId
from tailrace.transfer.queue.local.queue import LocalQueue
from tailrace.types import Value
from tests.transfer.client.servers import serving
from tests.transfer.remote.clock import Clock
from tests.transfer.remote.faces import Blocking, Face, remote, sync
from tests.transfer.tables import group, outputs, table, tokens

LEASE_S = 100.0
MAX_ROWS = 6
Late = Callable[[], None]
"""A function that lets all leases expire."""


def local_queue(stack: ExitStack, directory: Path, clock: Clock) -> Face:
    config = LocalQueueConfig(lease_s=LEASE_S, max_rows=MAX_ROWS)
    return stack.enter_context(Blocking(lambda: LocalQueue(table(), config, clock=clock)))


def served(face: Callable[..., AbstractContextManager[Face]]) -> Callable[[ExitStack, Path, Clock], Face]:
    def make(stack: ExitStack, directory: Path, clock: Clock) -> Face:
        running = serving(directory, units=2, clock=clock, lease_s=LEASE_S, max_rows=MAX_ROWS, unit_limit_s=1e6)
        return stack.enter_context(face(stack.enter_context(running).address, limit_s=1e6))

    return make


@pytest.fixture(params=[local_queue, served(remote), served(sync)], ids=["local", "remote", "sync"])
def queue_and_clock(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Face, Clock]]:
    clock = Clock()
    with ExitStack() as stack:
        yield request.param(stack, tmp_path, clock), clock


@pytest.fixture
def queue(queue_and_clock: tuple[Face, Clock]) -> Face:
    return queue_and_clock[0]


@pytest.fixture
def late(queue_and_clock: tuple[Face, Clock]) -> Late:
    queue, clock = queue_and_clock

    def expire() -> None:
        clock.jump(LEASE_S)
        while queue.stats().tasks["rollout"].leased:
            with pytest.raises(QueueTimeout):
                queue.claim("actor", limit=1, timeout=0)

    return expire


def works(queue: Face) -> None:
    """Assert that a good row passes through all tasks."""
    queue.put(group(1000))
    for task, cells in (("rollout", {"response_ids": tokens(3)}), ("reward", {"reward": 0.5}), ("actor", {})):
        claim = queue.claim(task, limit=1, timeout=20)
        assert [row.group_id for row in claim.rows] == [1000]
        queue.ack(claim, outputs(claim, **cells))
    assert queue.stats().rows == 0


def row(**cells: Value) -> list[NewRow]:
    return [NewRow(group_id=1, group_size=1, order=7, cells=cells)]


BAD_ROWS: Mapping[str, tuple[list[NewRow], type[QueueError], str]] = {
    "lacks a column": (row(), ColumnError, "row 7 of group 1 lacks column 'prompt_ids', which tasks read and none"),
    "unknown column": (row(prompt_ids=tokens(1), what=1), ColumnError, "unknown column 'what'; known: "),
    "a task's column": (row(prompt_ids=tokens(1), reward=0.5), ColumnError, "brings column 'reward', which a task"),
    "wrong dtype": (
        row(prompt_ids=np.zeros(2, np.float32)),
        ColumnError,
        r"column 'prompt_ids': got a float32 array of shape \(2,\), expected a 1-D int64 array",
    ),
    "wrong shape": (row(prompt_ids=np.zeros((2, 2), np.int64)), ColumnError, r"of shape \(2, 2\), expected a 1-D"),
    "no array": (row(prompt_ids="text"), ColumnError, "column 'prompt_ids': got str 'text', expected a 1-D int64"),
    "big integer": (row(prompt_ids=tokens(1), seed=2**63), ColumnError, "column 'seed': got int 9223372036854775808"),
    "incomplete group": (group(1, 3)[:2], QueueError, "group 1 says group_size 3, but 2 of its rows were put"),
    "endless group_id": (
        group(2**63),
        QueueError,
        "group_id of a row: got 9223372036854775808, expected an integer of 64",
    ),
    "too many rows": (group(1, MAX_ROWS + 1), QueueError, rf"can never fit queue\.max_rows {MAX_ROWS}"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows_are_refused(queue: Face, name: str) -> None:
    rows, error, text = BAD_ROWS[name]
    with pytest.raises(QueueError, match=text) as raised:
        queue.put(rows)
    assert type(raised.value) is error
    assert queue.stats().rows == 0
    works(queue)


def test_a_group_is_put_once_whether_it_is_there_or_has_left(queue: Face) -> None:
    queue.put(group(1))
    with pytest.raises(GroupExists, match="group 1 is in the queue already; each group is put once"):
        queue.put(group(1))
    claim = queue.claim("rollout")
    queue.ack(claim, outputs(claim, response_ids=tokens(1)))
    claim = queue.claim("reward")
    queue.ack(claim, outputs(claim, reward=0.5))
    claim = queue.claim("actor", limit=1)
    queue.ack(claim, outputs(claim))
    with pytest.raises(GroupExists, match="group 1 has been in the queue, and all of its rows were consumed"):
        queue.put(group(1))
    works(queue)


def test_bad_claims_are_refused(queue: Face) -> None:
    with pytest.raises(QueueError, match=r"no task 'critic' in the table; its tasks are \['actor', 'reward', 'rollout"):
        queue.claim("critic")
    for limit in (0, -1):
        with pytest.raises(QueueError, match=f"a claim's limit must be at least 1, got {limit}"):
            queue.claim("rollout", limit=limit)
    for wrong in (1.5, "4", True, 2**63):
        with pytest.raises(QueueError, match=f"a claim's limit: got {wrong!r}, expected an integer of 64 bits"):
            queue.claim("rollout", limit=wrong)
    for rank in (0, 3, -1):
        with pytest.raises(QueueError, match=f"names rank {rank}, but policy 'first_in' splits nothing") as raised:
            queue.claim("rollout", rank=rank)
        assert type(raised.value) is QueueError
    queue.put(group(1, 2))
    for _ in range(2):
        claim = queue.claim("rollout")
        queue.ack(claim, outputs(claim, response_ids=tokens(1)))
    with pytest.raises(QueueError, match="group 1 has 2 rows, but the claim's limit is 1"):
        queue.claim("reward", limit=1)
    with pytest.raises(QueueTimeout, match=r"claim of task 'rollout' waited 0 s"):
        queue.claim("rollout", timeout=0)
    claim = queue.claim("reward")
    queue.ack(claim, outputs(claim, reward=0.5))
    claim = queue.claim("actor", limit=2)
    queue.ack(claim, outputs(claim))
    works(queue)


BAD_OUTPUTS: Mapping[str, tuple[dict[str, Value], str]] = {
    "missing": ({}, r"task 'rollout' writes \['response_ids'\]; missing: \['response_ids'\]$"),
    "foreign": (
        {"response_ids": tokens(1), "reward": 0.5},
        r"task 'rollout' writes \['response_ids'\]; not its own: \['reward'\]$",
    ),
    "unknown": ({"response_ids": tokens(1), "what": 1}, "what"),
    "wrong dtype": ({"response_ids": np.zeros(1, np.float32)}, "expected a 1-D int64 array"),
}


@pytest.mark.parametrize("name", BAD_OUTPUTS)
def test_bad_outputs_are_refused_and_the_lease_goes_on(queue: Face, name: str) -> None:
    cells, text = BAD_OUTPUTS[name]
    queue.put(group(1))
    claim = queue.claim("rollout")
    with pytest.raises(ColumnError, match=text):
        queue.ack(claim, outputs(claim, **cells))
    queue.renew(claim)
    queue.ack(claim, outputs(claim, response_ids=tokens(1)))
    claim = queue.claim("reward")
    queue.ack(claim, outputs(claim, reward=0.5))
    claim = queue.claim("actor", limit=1)
    queue.ack(claim, outputs(claim))
    works(queue)


def test_rows_that_are_not_held_are_refused(queue: Face) -> None:
    queue.put(group(1))
    claim = queue.claim("rollout")
    done = outputs(claim, response_ids=tokens(1))
    for gone in (RowId(99, 0), RowId(-1, 0), RowId(0, 5)):
        with pytest.raises(StaleRowError, match=f"slot={gone.slot}, generation={gone.generation}"):
            queue.ack(claim, {gone: {"response_ids": tokens(1)}})
        with pytest.raises(StaleRowError, match=f"slot={gone.slot}, generation={gone.generation}"):
            queue.nack(claim, [gone])
    queue.ack(claim, done)
    lease = claim.lease_id
    calls: list[Callable[[], None]] = [lambda: queue.ack(claim, done), lambda: queue.nack(claim, list(done))]
    for call in calls:
        with pytest.raises(LeaseError, match=f"is not under lease {lease}: it was acked under it before"):
            call()
    with pytest.raises(LeaseError, match=rf"lease {lease} holds no rows \(any more\), so it cannot be renewed"):
        queue.renew(claim)
    queue.nack(claim)
    assert queue.stats().tasks["rollout"].consumed == 1


def test_a_row_of_another_claim_is_refused(queue: Face) -> None:
    queue.put(group(1, 2))
    first, second = queue.claim("rollout"), queue.claim("rollout")
    with pytest.raises(LeaseError, match=f"is not under lease {first.lease_id}"):
        queue.ack(first, outputs(second, response_ids=tokens(1)))
    with pytest.raises(LeaseError, match=f"is not under lease {first.lease_id}"):
        queue.nack(first, [row.id for row in second.rows])
    queue.ack(second, outputs(second, response_ids=tokens(2)))
    queue.ack(first, outputs(first, response_ids=tokens(1)))
    assert queue.stats().tasks["rollout"].consumed == 2


def test_an_ack_that_comes_after_the_lease_expired_is_refused(queue: Face, late: Late) -> None:
    queue.put(group(1))
    old = queue.claim("rollout")
    late()
    done = outputs(old, response_ids=tokens(1))
    with pytest.raises(LeaseError, match=r"the lease expired after .*`held`, which renews it, or raise queue\.lease_s"):
        queue.ack(old, done)
    with pytest.raises(LeaseError):
        queue.renew(old)
    new = queue.claim("rollout", timeout=20)
    assert [row.id for row in new.rows] == [row.id for row in old.rows]
    with pytest.raises(LeaseError, match=f"is not under lease {old.lease_id}"):
        queue.ack(old, done)
    queue.ack(new, outputs(new, response_ids=tokens(2)))
    assert len(queue.claim("reward").rows[0].cells["response_ids"]) == 2
    assert queue.stats().tasks["rollout"].expired == 1


def test_a_closed_queue_lets_work_in_hand_end_and_nothing_else(queue: Face) -> None:
    queue.put(group(1))
    claim = queue.claim("rollout")
    queue.close()
    for call in (lambda: queue.put(group(2)), lambda: queue.claim("rollout"), queue.lost_groups):
        with pytest.raises(QueueClosed):
            call()
    queue.ack(claim, outputs(claim, response_ids=tokens(1)))
    assert queue.stats().tasks["rollout"].consumed == 1


@pytest.mark.parametrize("snapshot", [b"", b"no snapshot", b"\x93" * 50])
def test_what_is_no_snapshot_is_refused(queue: Face, snapshot: bytes) -> None:
    with pytest.raises(QueueError, match="not a snapshot"):
        queue.restore(snapshot)
    works(queue)


def test_weights_that_are_older_than_the_newest_are_passed_over(queue: Face) -> None:
    for version in (3, 2, -1):
        queue.advance(version)
    assert queue.stats().version == 3
    works(queue)


def test_nothing_to_do_is_done(queue: Face) -> None:
    assert queue.put([]) == []
    queue.put(group(1))
    claim = queue.claim("rollout")
    queue.ack(claim, {})
    queue.nack(claim, [])
    assert queue.stats().tasks["rollout"].leased == 1
