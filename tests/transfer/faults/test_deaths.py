"""Moments of death that random kills seldom meet, one by one, at a controller without processes."""

from pathlib import Path

import pytest

from tailrace.errors import GroupExists
from tailrace.transfer.queue.controller import journal
from tailrace.transfer.queue.messages import Admitted, Claim, Claimed, Dismiss, Written, row_ids
from tailrace.transfer.queue.storage.base import PartId
from tests.transfer.controller.fakes import Site
from tests.transfer.controller.talk import (
    LIMIT_S,
    ack,
    ack_missing,
    alive,
    claim,
    replaced,
    site,
    stats,
    store,
    work,
    write,
)
from tests.transfer.controller.test_controller_machine import admit
from tests.transfer.tables import group


def counts(queue: Site) -> list[int]:
    """The number of rows of each unit."""
    return [unit.rows for unit in stats(queue).units]


def test_a_group_that_is_being_put_is_put_again_when_its_producer_died_before_it_was_written(tmp_path: Path) -> None:
    queue = site(tmp_path)
    queue.ask(admit(group(1, 2)), client="first")
    second = queue.send(replaced(admit(group(1, 2)), wait_s=100.0), client="second")
    assert queue.answer(second) is None, "nobody knows yet what becomes of it"
    store(queue, group(2, 1))  # no other put waits behind it
    queue.ask(Dismiss("first"))
    write(queue, queue.answer(second))
    assert stats(queue).rows == 3


def test_a_group_that_is_being_put_is_there_when_its_first_producer_has_written_it(tmp_path: Path) -> None:
    queue = site(tmp_path)
    first: Admitted = queue.ask(admit(group(1, 2)), client="first")
    second = queue.send(replaced(admit(group(1, 2)), wait_s=100.0), client="second")
    write(queue, first)
    with pytest.raises(GroupExists):
        queue.answer(second)


def test_rows_on_their_way_do_not_wait_for_a_unit_that_died_before_the_controller(tmp_path: Path) -> None:
    queue = site(tmp_path, 2, replicas=2)
    first, second = queue.units
    admitted: Admitted = queue.ask(admit(group(1, 2)))
    queue.units = [first]
    alive(queue, LIMIT_S + 1, first)
    queue.start()
    first.parts.update(PartId(*row, 0) for row in row_ids(admitted.rows))
    queue.ask(Written(first.number, admitted.rows))
    assert stats(queue).tasks["rollout"].ready == 2
    assert second.number not in [unit.number for unit in stats(queue).units]


def test_rows_on_their_way_count_as_their_units_after_the_controller_died(tmp_path: Path) -> None:
    queue = site(tmp_path, 2, replicas=2)
    admitted: Admitted = queue.ask(admit(group(1, 2)))
    queue.start()
    assert counts(queue) == [2, 2]
    write(queue, admitted)
    work(queue, "rollout", response_ids=3)
    assert counts(queue) == [2, 2]


def test_a_claim_whose_answer_died_with_the_controller_gets_the_same_lease(tmp_path: Path) -> None:
    queue = site(tmp_path)
    store(queue, group(1, 2))
    ticket = queue.send(Claim("rollout", None, None, 0.0))
    claimed = queue.answer(ticket)
    assert isinstance(claimed, Claimed)
    queue.start()
    assert queue.answer(ticket) == claimed


def test_outputs_in_lasting_storage_stay_through_a_restart_and_count_when_they_are_acked(tmp_path: Path) -> None:
    queue = site(tmp_path, lasting=True)
    [unit] = queue.units
    store(queue, group(1, 1))
    lease, [row] = claim(queue, "rollout")
    unit.parts.add(PartId(*row, lease))
    unit.die()
    queue.join(unit)
    queue.tick(1.0)
    assert unit.parts == {PartId(*row, 0), PartId(*row, lease)}
    ack(queue, lease, [row], response_ids=3)
    assert stats(queue).tasks["reward"].ready == 1


def test_new_rows_in_lasting_storage_are_in_the_queue_when_they_were_found_there(tmp_path: Path) -> None:
    queue = site(tmp_path, lasting=True)
    [unit] = queue.units
    admitted: Admitted = queue.ask(admit(group(1, 2)))
    unit.parts.update(PartId(*row, 0) for row in row_ids(admitted.rows))
    unit.die()
    queue.join(unit)
    assert stats(queue).tasks["rollout"].ready == 2
    assert unit.parts == {PartId(*row, 0) for row in row_ids(admitted.rows)}


def test_a_unit_that_was_started_anew_has_a_number_that_no_client_knows(tmp_path: Path) -> None:
    queue = site(tmp_path, 2)
    last = queue.units[1]
    last.die()
    queue.join(last)
    assert last.number == 2


def test_a_unit_that_missed_outputs_does_not_count_until_it_has_them(tmp_path: Path) -> None:
    queue = site(tmp_path, 2, replicas=2)
    store(queue, group(1, 1))
    lease, rows = claim(queue, "rollout")
    ack_missing(queue, lease, rows, {"response_ids": 3}, [1])
    queue.tick(1.0)
    assert counts(queue) == [1, 0]
    assert stats(queue).lacking_rows == 1
    queue.copy()
    assert counts(queue) == [1, 1]
    assert queue.units[1].parts == queue.units[0].parts == {PartId(*rows[0], 0), PartId(*rows[0], lease)}
    assert stats(queue).lacking_rows == 0


def test_a_journal_that_begins_anew_between_two_changes_tells_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal.Journal, "is_long", True)
    queue = site(tmp_path)
    for number in range(32):
        admitted: Admitted = queue.ask(admit(group(number, 2)))
        if number % 16 == 3:
            queue.start()
        write(queue, admitted)
        work(queue, "rollout", response_ids=3)
        lease, rows = claim(queue, "reward")
        if number % 16 == 9:
            queue.start()
        ack(queue, lease, rows, reward=1)
        lease, rows = claim(queue, "actor", limit=2)
        ack(queue, lease, rows)
    queue.start()
    counted = stats(queue)
    assert (counted.rows, counted.tasks["actor"].consumed) == (0, 64)
