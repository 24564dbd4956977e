"""Both clients, blocking and asynchronous, of a queue of two controllers."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random

import numpy as np
import pytest

from tailrace.errors import ColumnError, GroupExists, LeaseError, QueueClosed, QueueError, QueueTimeout, StaleRowError
from tailrace.transfer.queue.base import Claim, NewRow, RowId
from tailrace.transfer.queue.client.base import operations_of
from tailrace.transfer.queue.client.look import fullest, read_stats, retire_unit
from tailrace.transfer.queue.client.remote import RemoteQueue
from tailrace.transfer.queue.client.shards import PartedClaim
from tailrace.transfer.queue.client.sync_queue import SyncQueue
from tailrace.transfer.queue.messages import QUEUE
from tailrace.transfer.queue.policies.first_in import FirstIn
from tailrace.transfer.queue.policies.groups import WholeGroups
from tailrace.transfer.queue.policies.token_budget import TokenBudget
from tailrace.transfer.queue.rows.table import QueueTask
from tailrace.transfer.wire.calls import Operation
from tailrace.transfer.wire.sync import SyncClient
from tailrace.types import Value
from tests.helpers.effort import effort
from tests.transfer.client.servers import LIMIT_S, MAX_BYTES, joined, serving, serving_several
from tests.transfer.remote.faces import Face, remote, sync
from tests.transfer.tables import group, one_task, orders, outputs, table, tokens

STEP = 400
"""The window of a training step: 4 groups, whose orders begin at multiples of 100."""


@pytest.fixture(params=[sync, remote], ids=["sync", "async"])
def face(request: pytest.FixtureRequest) -> Face:
    chosen: Face = request.param
    return chosen


def singles() -> Sequence[QueueTask]:
    return one_task(FirstIn(1))


def steps(tokens: int | None = None) -> Sequence[QueueTask]:
    return one_task(TokenBudget(tokens, window=STEP, response_column="prompt_ids", ends_with_window=True))


def trained_by_steps() -> Sequence[QueueTask]:
    return table(FirstIn(1), FirstIn(1), TokenBudget(4, window=STEP, ends_with_window=True))


async def graded(queue: RemoteQueue, claim: Claim) -> None:
    """Make the rows of a claim of the task rollout ready for the actor."""
    await queue.ack(claim, outputs(claim, response_ids=tokens(5)))
    claimed = await queue.claim("reward")
    await queue.ack(claimed, outputs(claimed, reward=0.5))


def groups_of(claim: Claim) -> list[int]:
    return [row.group_id for row in claim.rows]


def test_rows_of_all_controllers_pass_from_task_to_task(tmp_path: Path, face: Face) -> None:
    with serving_several(tmp_path, table) as (address, _), face(address) as queue:
        ids = queue.put([row for number in range(4) for row in group(number, 2)])
        assert len(set(ids)) == 8
        claims = [queue.claim("rollout", timeout=LIMIT_S) for _ in range(8)]
        assert sorted(row.id for claim in claims for row in claim.rows) == sorted(ids)
        for claim in claims:
            queue.ack(claim, outputs(claim, response_ids=tokens(claim.rows[0].order % 7)))
        for _ in range(4):
            claim = queue.claim("reward", timeout=LIMIT_S)
            assert [len(row.cells["response_ids"]) for row in claim.rows] == [order % 7 for order in orders(claim)]
            queue.ack(claim, outputs(claim, reward=0.5))
        assert [
            part_rows for part_rows in (read_stats(one, name="test", limit_s=LIMIT_S).rows for one in address.each)
        ] == [4, 4]
        stats = queue.stats()
        assert (stats.rows, stats.tasks["reward"].consumed, len({unit.number for unit in stats.units})) == (8, 8, 2)


def test_a_claim_waits_at_all_controllers_and_the_first_that_has_rows_answers(tmp_path: Path) -> None:
    async def run() -> None:
        async with asyncio.timeout(LIMIT_S), RemoteQueue(address, name="tester") as queue:
            for number in (1, 0, 3):
                waiting = asyncio.create_task(queue.claim("only"))
                while (await queue.stats()).tasks["only"].claims < 2:
                    pass
                await queue.put(group(number))
                claim = await waiting
                assert groups_of(claim) == [number]
                await queue.ack(claim, outputs(claim))
            while (await queue.stats()).tasks["only"].claims:
                pass  # the other claims were taken back

    with serving_several(tmp_path, singles) as (address, _):
        asyncio.run(run())


def test_a_whole_step_is_put_together_from_all_controllers_in_the_order_of_the_run(tmp_path: Path, face: Face) -> None:
    with serving_several(tmp_path, steps) as (address, _), face(address) as queue:
        queue.put([row for number in (3, 2, 1, 0) for row in group(number, 2)])
        queue.put([row for number in (7, 6, 5, 4) for row in group(number, 2)])
        for first in (0, 4):
            claim = queue.claim("only", limit=8, timeout=LIMIT_S)
            assert groups_of(claim) == [number for number in range(first, first + 4) for _ in range(2)]
            queue.renew(claim)
            queue.ack(claim, outputs(claim))
        assert queue.stats().rows == 0


def test_no_claim_gets_rows_of_a_step_while_another_controller_has_rows_of_an_earlier_one(
    tmp_path: Path, face: Face
) -> None:
    with serving_several(tmp_path, lambda: steps(tokens=4)) as (address, _), face(address) as queue:
        for first in (0, 4):
            queue.put([row for number in range(first, first + 4) for row in group(number, prompt=2)])
        seen: list[int] = []
        while len(seen) < 8:
            claim = queue.claim("only", limit=4 - len(seen) % 4, timeout=LIMIT_S)
            seen += groups_of(claim)
            queue.ack(claim, outputs(claim))
        assert [sorted(seen[:4]), sorted(seen[4:])] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_rows_of_a_later_step_that_are_ready_first_do_not_end_the_wait_for_those_of_an_earlier_one(
    tmp_path: Path,
) -> None:
    """When the wait began, no controller had rows."""

    async def run() -> None:
        async with asyncio.timeout(LIMIT_S), RemoteQueue(address, name="tester") as queue:
            waiting = asyncio.create_task(queue.claim("actor"))
            while (await queue.stats()).tasks["actor"].claims < 2:
                pass
            for number in (1, 4):  # of the first step at one controller, and of the second step at the other one
                await queue.put(group(number))
            made = {}
            for _ in range(2):
                claim = await queue.claim("rollout")
                made[claim.rows[0].group_id] = claim
            for number in (4, 1):
                await graded(queue, made[number])
            for number, coming in ((1, waiting), (4, queue.claim("actor"))):
                claim = await coming
                assert groups_of(claim) == [number]
                await queue.ack(claim, outputs(claim))

    with serving_several(tmp_path, trained_by_steps) as (address, _):
        asyncio.run(run())


async def test_a_claim_goes_on_to_the_next_step_when_another_client_got_the_rows_that_it_waited_for(
    tmp_path: Path,
) -> None:
    with serving_several(tmp_path, trained_by_steps) as (address, _):
        async with (
            asyncio.timeout(LIMIT_S),
            RemoteQueue(address, name="one") as one,
            RemoteQueue(address, name="two") as two,
        ):
            for number in (4, 1):  # of the second step at one controller, and of the first step at the other one
                await one.put(group(number))
            made = {claim.rows[0].group_id: claim for claim in [await one.claim("rollout") for _ in range(2)]}
            await graded(one, made[4])
            waiting = [asyncio.create_task(client.claim("actor")) for client in (one, two)]
            while (await one.stats()).tasks["actor"].claims < 2:
                pass
            await graded(one, made[1])
            assert sorted(map(groups_of, await asyncio.gather(*waiting))) == [[1], [4]]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("asked", range(4))
def test_rows_that_enter_between_two_questions_of_a_claim_are_claimed_in_order(
    tmp_path: Path, first: int, asked: int
) -> None:
    """The rows enter after so many messages; the controller `first` has those of the first step."""
    earlier, later = first, 4 + (1 - first)

    def interrupted() -> Operation[Claim]:
        operation = operations_of(address, shared_memory=False).claim("only", limit=None, rank=None, timeout=LIMIT_S)
        step = next(operation)
        for number in count():
            if number == asked:
                producer.put(group(earlier))
                producer.put(group(later))
            outcomes = yield step
            try:
                step = operation.send(outcomes)
            except StopIteration as end:
                claim: Claim = end.value
                return claim
        raise AssertionError("the claim has no end")

    with (
        serving_several(tmp_path, lambda: steps(tokens=4)) as (address, _),
        SyncQueue(address, name="producer") as producer,
        SyncClient("tester", address.token, QUEUE) as client,
    ):
        assert groups_of(client.run(interrupted())) == [earlier]


def test_rows_that_came_back_are_claimed_before_those_of_the_next_step(tmp_path: Path, face: Face) -> None:
    with serving_several(tmp_path, steps) as (address, _), face(address) as queue:
        for first in (0, 4):
            queue.put([row for number in range(first, first + 4) for row in group(number)])
        claim = queue.claim("only", limit=4, timeout=LIMIT_S)
        queue.nack(claim, [claim.rows[1].id, claim.rows[3].id])
        queue.ack(claim, outputs(replace(claim, rows=(claim.rows[0], claim.rows[2]))))
        again = queue.claim("only", limit=2, timeout=LIMIT_S)
        assert groups_of(again) == [1, 3]
        queue.ack(again, outputs(again))
        assert groups_of(queue.claim("only", limit=4, timeout=LIMIT_S)) == [4, 5, 6, 7]


def test_a_step_that_one_controller_lacks_is_given_back_when_its_time_is_over(tmp_path: Path, face: Face) -> None:
    with serving_several(tmp_path, steps) as (address, _), face(address) as queue:
        queue.put(group(0))
        with pytest.raises(QueueTimeout):
            queue.claim("only", limit=2, timeout=0.05)
        assert queue.stats().tasks["only"].leased == 0
        queue.put(group(1))
        assert groups_of(queue.claim("only", limit=2, timeout=LIMIT_S)) == [0, 1]


def test_an_ack_that_one_controller_refuses_changes_nothing(tmp_path: Path, face: Face) -> None:
    with serving_several(tmp_path, steps) as (address, _), face(address) as queue:
        queue.put([row for number in range(4) for row in group(number)])
        claim = queue.claim("only", limit=4, timeout=LIMIT_S)
        queue.nack(claim, [row.id for row in claim.rows if row.group_id % 2])
        with pytest.raises(LeaseError):
            queue.ack(claim, outputs(claim))
        assert queue.stats().tasks["only"].consumed == 0
        queue.renew(claim)
        queue.nack(claim)
        with pytest.raises(LeaseError):
            queue.renew(claim)
        assert queue.stats().tasks["only"].ready == 4


def test_an_ack_of_rows_that_one_controller_has_lost_since_changes_nothing(tmp_path: Path, face: Face) -> None:
    with serving_several(tmp_path, steps) as (address, _), face(address) as queue:
        queue.put([row for number in range(4) for row in group(number)])
        claim = queue.claim("only", limit=4, timeout=LIMIT_S)
        assert queue.remake(claim, [1], most=3) == [1], "its controller still leases group 3"
        with pytest.raises(StaleRowError):
            queue.ack(claim, outputs(claim))
        assert queue.stats().tasks["only"].consumed == 0
        queue.ack(claim, {row: own for row, own in outputs(claim).items() if row != claim.rows[1].id})
        assert queue.stats().tasks["only"].consumed == 3


def test_what_comes_again_of_a_step_is_claimed_without_rows_of_the_next(tmp_path: Path, face: Face) -> None:
    with serving_several(tmp_path, steps) as (address, _), face(address) as queue:
        for step in range(2):
            queue.put([row for number in range(4 * step, 4 * step + 4) for row in group(number, 2)])
        claim = queue.claim("only", limit=8, timeout=LIMIT_S)
        queue.remake(claim, [1, 2], most=3)
        kept = {row.id for row in claim.rows if row.group_id in (0, 3)}
        queue.ack(claim, {row: own for row, own in outputs(claim).items() if row in kept})
        lost: dict[int, int] = {}
        while len(lost) < 2:
            lost |= (found := queue.lost_groups(timeout=LIMIT_S))
            for number in found:
                queue.put(group(number, 2))
        for expected in ([1, 1, 2, 2], [4, 4, 5, 5, 6, 6, 7, 7]):
            claim = queue.claim("only", limit=8, timeout=LIMIT_S)
            assert groups_of(claim) == expected
            queue.ack(claim, outputs(claim))


@pytest.mark.parametrize("comes_again", [0, 1, 2])
def test_what_comes_again_while_the_next_step_is_claimed_is_a_claim_of_its_own(
    tmp_path: Path, face: Face, comes_again: int
) -> None:
    with serving_several(tmp_path, steps) as (address, _), face(address) as queue:
        queue.put([row for number in range(4) for row in group(number, 2)])
        first = queue.claim("only", limit=8, timeout=LIMIT_S)
        queue.put([row for number in range(4, 8) for row in group(number, 2)])
        queue.nack(second := queue.claim("only", limit=8, timeout=LIMIT_S))
        assert groups_of(second) == [4, 4, 5, 5, 6, 6, 7, 7], "the client asks for rows of the second step by now"
        queue.nack(first, [row.id for row in first.rows if row.group_id == comes_again])
        for expected in ([comes_again] * 2, [4, 4, 5, 5, 6, 6, 7, 7]):
            claim = queue.claim("only", limit=8, timeout=LIMIT_S)
            assert groups_of(claim) == expected
            queue.ack(claim, outputs(claim))


def test_the_parts_of_a_claim_keep_no_cells(tmp_path: Path, face: Face) -> None:
    with serving_several(tmp_path, steps) as (address, _), face(address) as queue:
        queue.put([row for number in range(4) for row in group(number)])
        claim = queue.claim("only", limit=4, timeout=LIMIT_S)
        assert isinstance(claim, PartedClaim)
        assert all(row.cells for row in claim.rows)
        assert not any(row.cells for part in claim.parts for row in part.claim.rows)


def test_an_ack_with_a_bad_cell_for_one_controller_changes_nothing(tmp_path: Path, face: Face) -> None:
    with serving_several(tmp_path, steps) as (address, _), face(address) as queue:
        queue.put([row for number in range(4) for row in group(number)])
        claim = queue.claim("only", limit=4, timeout=LIMIT_S)
        good = outputs(claim)
        last = claim.rows[-1].id
        with pytest.raises(ColumnError):
            queue.ack(claim, {**good, last: {**good[last], "reward": 1.0}})
        assert queue.stats().tasks["only"].consumed == 0
        queue.ack(claim, good)
        assert queue.stats().rows == 0


def test_groups_are_remade_and_put_again_at_their_controllers(tmp_path: Path, face: Face) -> None:
    with serving_several(tmp_path, steps) as (address, _), face(address) as queue:
        queue.put([row for number in range(4) for row in group(number, 2)])
        claim = queue.claim("only", limit=8, timeout=LIMIT_S)
        assert sorted(queue.remake(claim, [1, 2], most=3)) == [1, 2]
        lost: dict[int, int] = {}
        while len(lost) < 2:
            lost |= (found := queue.lost_groups(timeout=LIMIT_S))
            for number in found:
                queue.put(group(number, 2))
        assert lost == {1: 1, 2: 1}
        again = queue.claim("only", limit=4, timeout=LIMIT_S)
        assert groups_of(again) == [1, 1, 2, 2]
        with pytest.raises(QueueError, match="0 rows of group 7 are under lease"):
            queue.remake(again, [7], most=3)


def test_a_repeated_put_that_is_broken_off_may_be_repeated_again(tmp_path: Path) -> None:
    rows = [row for number in range(4) for row in group(number)]

    def broken_off() -> Operation[list[RowId]]:
        operations = operations_of(address, shared_memory=False)
        with pytest.raises(QueueTimeout, match="rows"):
            yield from operations.put(rows, timeout=0.05)
        for _ in range(3):
            claim = consumer.claim("only", timeout=LIMIT_S)
            consumer.ack(claim, outputs(claim))
        repeated = operations.put(rows, timeout=LIMIT_S)
        next(repeated)  # which of the groups that entered were lost?
        repeated.close()
        return (yield from operations.put(rows, timeout=LIMIT_S))

    with (
        serving_several(tmp_path, singles, max_rows=2) as (address, _),
        SyncQueue(address, name="consumer") as consumer,
        SyncClient("tester", address.token, QUEUE) as client,
    ):
        consumer.put(group(5))
        assert len(set(client.run(broken_off()))) == 4


def test_a_put_that_one_controller_refuses_may_be_repeated(tmp_path: Path, face: Face) -> None:
    rows = [row for number in range(4) for row in group(number)]
    with serving_several(tmp_path, singles, max_rows=2) as (address, _), face(address) as queue:
        queue.put(group(5))
        with pytest.raises(QueueTimeout, match="rows"):
            queue.put(rows, timeout=0.05)
        assert queue.stats().rows == 3
        claims = [queue.claim("only", timeout=LIMIT_S) for _ in range(3)]
        for claim in claims:
            queue.ack(claim, outputs(claim))
        ids = queue.put(rows, timeout=LIMIT_S)
        assert [row.group_id for claim in claims for row in claim.rows if row.id in ids] == [0, 2]
        assert queue.stats().rows == 2


@pytest.mark.parametrize("is_put_alone", [False, True])
def test_a_group_that_is_lost_before_its_put_is_repeated_enters_again(
    tmp_path: Path, face: Face, is_put_alone: bool
) -> None:
    rows = [row for number in range(4) for row in group(number)]
    with serving_several(tmp_path, singles, max_rows=2) as (address, _), face(address) as queue:
        queue.put(group(5))
        with pytest.raises(QueueTimeout, match="rows"):
            queue.put(rows, timeout=0.05)
        claims = {claim.rows[0].group_id: claim for claim in (queue.claim("only", timeout=LIMIT_S) for _ in range(3))}
        queue.remake(claims[0], [0], most=3)
        queue.ack(claims[5], outputs(claims[5]))
        if is_put_alone:
            queue.put(group(0))
        ids = queue.put(rows, timeout=LIMIT_S)
        assert ids[2] == claims[2].rows[0].id
        assert ids[0] != claims[0].rows[0].id
        assert queue.stats().lost_groups == 0
        queue.nack(claims[2])
        again = [queue.claim("only", timeout=LIMIT_S) for _ in range(4)]
        assert {claim.rows[0].group_id: claim.rows[0].id for claim in again} == dict(enumerate(ids))


def test_other_rows_are_not_taken_for_those_of_a_put_that_one_controller_refused(tmp_path: Path, face: Face) -> None:
    rows = [row for number in range(4) for row in group(number)]
    others = [replace(row, cells={**row.cells, "prompt_ids": tokens(7)}) for row in rows]
    with serving_several(tmp_path, singles, max_rows=2) as (address, _), face(address) as queue:
        queue.put(group(5))
        with pytest.raises(QueueTimeout, match="rows"):
            queue.put(rows, timeout=0.05)
        with pytest.raises((GroupExists, QueueTimeout)):
            queue.put(others, timeout=0.05)
        claims = [queue.claim("only", timeout=LIMIT_S) for _ in range(3)]
        for claim in claims:
            queue.ack(claim, outputs(claim))
        with pytest.raises(QueueTimeout):
            queue.claim("only", timeout=0.05)


def test_a_producer_that_starts_again_puts_what_an_earlier_one_has_not_put(tmp_path: Path, face: Face) -> None:
    with serving_several(tmp_path, singles) as (address, _), face(address) as queue:
        queue.put(group(0))
        with pytest.raises(GroupExists, match="group 0"):
            queue.put([*group(0), *group(1)])
        assert queue.stats().rows == 2
        with pytest.raises(GroupExists, match="group 0"):
            queue.put([*group(0), *group(1)])


def test_bad_calls_are_the_same_errors_as_with_one_controller(tmp_path: Path, face: Face) -> None:
    with serving_several(tmp_path, table) as (address, _), face(address) as queue:
        with pytest.raises(ColumnError, match="row 7 of group 1 lacks column 'prompt_ids'"):
            queue.put([NewRow(group_id=1, group_size=1, order=7, cells={})])
        with pytest.raises(QueueError, match="no task 'critic' in the table"):
            queue.claim("critic")
        with pytest.raises(QueueError, match="limit must be at least 1, got 0"):
            queue.claim("rollout", limit=0)
        with pytest.raises(QueueTimeout, match="claim of task 'reward' waited"):
            queue.claim("reward", timeout=0)
        queue.put(group(1))
        claim = queue.claim("rollout", timeout=LIMIT_S)
        with pytest.raises(LeaseError, match="not under the claim"):
            queue.ack(claim, {claim.rows[0].id._replace(slot=4): {"response_ids": tokens(1)}})
        queue.ack(claim, outputs(claim, response_ids=tokens(1)))
        with pytest.raises(LeaseError):
            queue.ack(claim, outputs(claim, response_ids=tokens(1)))
        queue.close()
        with pytest.raises(QueueClosed):
            queue.claim("rollout")
        with pytest.raises(QueueClosed):
            queue.lost_groups()


def test_rows_wait_for_their_weight_version_at_each_controller(tmp_path: Path, face: Face) -> None:
    rows = [replace(row, not_before=3) for number in range(2) for row in group(number)]
    with serving_several(tmp_path, singles) as (address, _), face(address) as queue:
        with pytest.raises(QueueTimeout, match="version 3"):
            queue.put(rows, timeout=0.05)
        queue.advance(3)
        queue.put(rows, timeout=LIMIT_S)
        assert queue.stats().version == 3


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_a_queue_goes_on_from_a_snapshot_with_another_number_of_controllers(
    tmp_path: Path, face: Face, before: int, after: int
) -> None:
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
    long = 20_000
    with serving_several(tmp_path / "before", table, controllers=before) as (address, _), face(address) as queue:
        queue.put([row for number in range(9) for row in group(number, prompt=long if number % 2 else 3)])
        for _ in range(5):
            claim = queue.claim("rollout", timeout=LIMIT_S)
            queue.ack(claim, outputs(claim, response_ids=tokens(1 + claim.rows[0].group_id)))
        queue.claim("rollout", timeout=LIMIT_S)
        stats, data = queue.stats(), queue.snapshot()
    with serving_several(tmp_path / "after", table, controllers=after) as (address, _), face(address) as queue:
        queue.restore(data)
        restored = queue.stats()
        assert (restored.rows, restored.tasks["rollout"].consumed) == (stats.rows, stats.tasks["rollout"].consumed)
        for _ in range(4):
            claim = queue.claim("rollout", timeout=LIMIT_S)
            queue.ack(claim, outputs(claim, response_ids=tokens(1 + claim.rows[0].group_id)))
        claims = [queue.claim("reward", timeout=LIMIT_S) for _ in range(9)]
        assert sorted(number for claim in claims for number in groups_of(claim)) == list(range(9))
        for claim in claims:
            for row in claim.rows:
                np.testing.assert_array_equal(row.cells["response_ids"], tokens(1 + row.group_id))
        for number in range(9):
            with pytest.raises(GroupExists):
                queue.put(group(number))
        queue.put(group(9))


@pytest.mark.parametrize("place", [0, 1])
def test_a_controller_that_is_silent_holds_up_no_claim_of_rows_that_others_have(
    tmp_path: Path, face: Face, place: int
) -> None:
    """The client's limit is longer than any test. `place`: that of the controller that lives."""
    for name in "ab":
        (tmp_path / name).mkdir()
    with serving(tmp_path / "a", tasks=singles(), controllers=2) as alive:
        with serving(tmp_path / "b", tasks=singles(), controllers=2) as dead:
            pass
        addresses = [alive.address, dead.address] if place == 0 else [dead.address, alive.address]
        with face(joined(addresses), limit_s=3600.0) as queue:
            numbers = range(place, 6, 2)
            queue.put([row for number in numbers for row in group(number)])
            claims = [queue.claim("only", timeout=LIMIT_S) for _ in range(3)]
            assert Counter(number for claim in claims for number in groups_of(claim)) == Counter(numbers)


def test_a_dead_unit_of_one_controller_is_noticed_though_another_has_never_known_it(tmp_path: Path, face: Face) -> None:
    """The client's limit is longer than any test."""
    with (
        serving_several(tmp_path, singles, unit_limit_s=3.0) as (address, parts),
        face(address, limit_s=3600.0) as queue,
    ):
        queue.put([row for number in range(4) for row in group(number, prompt=20_000)])
        parts[1].stop_unit(0)
        lost: dict[int, int] = {}
        while len(lost) < 2:
            lost |= queue.lost_groups(timeout=LIMIT_S)
        assert lost.keys() == {1, 3}
        claims = [queue.claim("only", timeout=LIMIT_S) for _ in range(2)]
        assert sorted(number for claim in claims for number in groups_of(claim)) == [0, 2]


def test_units_are_looked_for_at_all_controllers(tmp_path: Path) -> None:
    with serving_several(tmp_path, singles, units=2) as (address, parts):
        with SyncQueue(address, name="tester") as queue:
            queue.put(group(1, prompt=20_000))
        assert fullest(address, limit_s=LIMIT_S).endpoint == parts[1].address.endpoint
        stats = read_stats(address, name="test", limit_s=LIMIT_S)
        assert [unit.max_bytes for unit in stats.units] == [MAX_BYTES] * 4
        assert sorted(unit.number for unit in stats.units) == [0, 1, 2, 3]
        with pytest.raises(ValueError, match="no unit 'nobody'"):
            retire_unit(address, "nobody", limit_s=LIMIT_S)


async def test_a_cancelled_claim_of_parts_leaves_no_row_leased(tmp_path: Path) -> None:
    with serving_several(tmp_path, steps) as (address, _):
        async with asyncio.timeout(LIMIT_S), RemoteQueue(address, name="tester") as queue:
            await queue.put([row for number in range(4) for row in group(number)])
            for turns in range(60):
                doomed = asyncio.create_task(queue.claim("only", limit=4))
                for _ in range(turns):
                    await asyncio.sleep(0)
                doomed.cancel()
                await asyncio.wait([doomed])
                if not doomed.cancelled():
                    await queue.nack(doomed.result())
            claim = await queue.claim("only", limit=4)
            assert groups_of(claim) == [0, 1, 2, 3]
            async with queue.held(claim):
                await queue.ack(claim, outputs(claim))


async def test_a_cancelled_claim_that_waits_for_a_part_leaves_no_row_leased(tmp_path: Path) -> None:
    with serving_several(tmp_path, steps) as (address, _):
        async with asyncio.timeout(LIMIT_S), RemoteQueue(address, name="tester") as queue:
            for turns in range(40):
                first = 4 * turns
                await queue.put([row for number in range(first, first + 3) for row in group(number)])
                doomed = asyncio.create_task(queue.claim("only", limit=4))
                put = asyncio.create_task(queue.put(group(first + 3)))
                for _ in range(turns):
                    await asyncio.sleep(0)
                doomed.cancel()
                await asyncio.wait([doomed, put])
                if not doomed.cancelled():
                    await queue.nack(doomed.result())
                claim = await queue.claim("only", limit=4)
                assert groups_of(claim) == [*range(first, first + 4)]
                await queue.ack(claim, outputs(claim))


async def test_who_waits_for_lost_groups_hears_of_those_in_a_restored_snapshot(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with serving(tmp_path / "first", tasks=singles()) as served:
        async with RemoteQueue(served.address, name="tester") as queue:
            await queue.put(group(5))
            await queue.remake(await queue.claim("only"), [5], most=3)
            snapshot = await queue.snapshot()
    with serving(tmp_path / "second", tasks=singles()) as served:
        async with asyncio.timeout(LIMIT_S), RemoteQueue(served.address, name="tester") as queue:
            waiting = asyncio.create_task(queue.lost_groups())
            await queue.stats()  # by now the controller knows that one waits
            await queue.restore(snapshot)
            assert await waiting == {5: 1}


@pytest.mark.parametrize("seed", range(effort(12, 4)))
def test_every_row_comes_to_every_task_once_whatever_is_given_back(tmp_path: Path, face: Face, seed: int) -> None:
    def of_three() -> Sequence[QueueTask]:
        return table(FirstIn(3), WholeGroups(2), TokenBudget(12, window=STEP, ends_with_window=True))

    random = Random(seed)
    cells: dict[str, dict[str, Value]] = {
        "rollout": {"response_ids": tokens(3)},
        "reward": {"reward": 0.5},
        "actor": {},
    }
    consumed: Counter[tuple[str, int]] = Counter()
    unput = [group(number, random.randint(1, 3)) for number in range(24)]
    expected = {(task, row.order): 1 for task in cells for rows in unput for row in rows}
    with serving_several(tmp_path, of_three, controllers=3) as (address, _), face(address) as queue:
        while len(consumed) < len(expected):
            if unput and random.random() < 0.3:
                count = random.randint(1, 5)
                queue.put([row for rows in unput[:count] for row in rows])
                del unput[:count]
            task = random.choice(list(cells))
            try:
                claim = queue.claim(task, limit=random.choice([None, 3, 6]), timeout=0)
            except QueueTimeout:
                continue
            own = [row for row in claim.rows if random.random() < 0.8]
            queue.ack(claim, {row.id: cells[task] for row in own})
            consumed.update((task, row.order) for row in own)
            queue.nack(claim)
        assert consumed == expected
        assert (queue.stats().rows, queue.stats().bytes) == (0, 0)
