from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailrace.errors import (
    ColumnError,
    LeaseError,
    PeerLost,
    QueueClosed,
    QueueError,
    QueueTimeout,
    StaleRowError,
    StorageFull,
    TailraceError,
    WireError,
)
from tailrace.planning.balance import lpt
from tailrace.transfer.queue.base import NewRow, QueueStats, RowId
from tailrace.transfer.queue.policies.balanced import BalancedByLength
from tailrace.transfer.queue.policies.first_in import FirstIn
from tailrace.transfer.queue.policies.token_budget import TokenBudget
from tailrace.transfer.queue.storage.base import PartId
from tailrace.transfer.queue.table import QueueTask
from tailrace.transfer.queue.wire.messages import (
    NO_UNIT,
    Accepted,
    Ack,
    Admit,
    Admitted,
    Advance,
    Beat,
    Cancel,
    Claim,
    Claimed,
    Close,
    Export,
    Exported,
    Groups,
    Lost,
    Nack,
    Release,
    Renew,
    Restore,
    Stats,
    Withdraw,
    Withdrawn,
    Written,
    pack,
    row_ids,
    unpack,
)
from tests.transfer.controller.fakes import FakeUnit, Site
from tests.transfer.controller.test_controller_machine import admit, ints, one_run
from tests.transfer.tables import group, one_task, table

LIMIT_S = 10.0


def site(directory: Path, units: int = 1, *, lasting: bool = False, **config: Any) -> Site:
    made = [FakeUnit("abc"[number], lasting=lasting) for number in range(units)]
    return Site(lambda: table(FirstIn(9)), directory, units=made, unit_limit_s=LIMIT_S, **config)


def alive(site: Site, seconds: float, *units: FakeUnit) -> None:
    """Time passes, and these units give signs of life."""
    for _ in range(int(seconds)):
        for unit in units:
            site.join(unit)
        site.tick(1.0)


def store(site: Site, rows: list[NewRow]) -> list[RowId]:
    """Put and write rows."""
    admitted: Admitted = site.ask(admit(rows))
    write(site, admitted)
    return row_ids(admitted.rows)


def write(site: Site, admitted: Admitted) -> None:
    for number in admitted.units:
        site.unit(number).parts.update(PartId(*row, 0) for row in row_ids(admitted.rows))
        site.ask(Written(number, admitted.rows))


def claim(site: Site, task: str, *, limit: int | None = None, client: str = "client") -> tuple[int, list[RowId]]:
    claimed: Claimed = site.ask(Claim(task, limit, None, 0.0), client)
    return claimed.lease_id, [RowId(slot, generation) for slot, generation, _, _ in unpack(claimed.rows, 4).tolist()]


def ack(site: Site, lease: int, rows: list[RowId], **lengths: int) -> None:
    ack_missing(site, lease, rows, lengths, [])


def ack_missing(site: Site, lease: int, rows: list[RowId], lengths: Mapping[str, int], missed: list[int]) -> None:
    """All units that have the rows get the outputs but those in `missed`."""
    for row in rows:
        for unit in site.units:
            if lengths and PartId(*row, 0) in unit.parts and unit.number not in missed:
                unit.parts.add(PartId(*row, lease))
    versions = ints([[-1]] * len(rows))
    assert site.ask(Ack(lease, pack(rows), versions, one_run(lengths, len(rows)), missed)) == Accepted()


def work(site: Site, task: str, **lengths: int) -> list[RowId]:
    lease, rows = claim(site, task)
    ack(site, lease, rows, **lengths)
    return rows


def stats(site: Site) -> QueueStats:
    counts: QueueStats = site.ask(Stats()).stats
    return counts


def test_rows_are_claimed_when_every_unit_has_them_and_not_before(tmp_path: Path) -> None:
    queue = site(tmp_path, 2, replicas=2)
    admitted: Admitted = queue.ask(admit(group(1, 2)))
    assert sorted(admitted.units) == [0, 1]
    waiting = queue.send(Claim("rollout", None, None, 5.0))
    queue.ask(Written(admitted.units[0], admitted.rows))
    assert queue.answer(waiting) is None
    queue.ask(Written(admitted.units[1], admitted.rows))
    claimed: Claimed = queue.answer(waiting)
    assert claimed.width == 2
    assert sorted(unpack(claimed.units, 2)[0].tolist()) == [0, 1]


@pytest.mark.parametrize(
    "end",
    [
        lambda queue, admitted: queue.ask(Withdraw(admitted.rows, ints([[1], [1]]))),
        lambda queue, admitted: queue.ask(Cancel(queue._numbers)),
        lambda queue, admitted: queue.tick(queue.controller._desk.config.lease_s),
        lambda queue, admitted: queue.controller.gone("client"),
    ],
)
def test_an_admission_that_is_not_written_is_withdrawn_and_its_group_may_come_again(tmp_path, end) -> None:  # type: ignore[no-untyped-def]
    queue = site(tmp_path, lease_s=5.0)
    admitted: Admitted = queue.ask(admit(group(1, 2)))
    end(queue, admitted)
    assert (stats(queue).rows, stats(queue).bytes) == (0, 0)
    [unit] = queue.units
    unit.parts.update(PartId(*row, 0) for row in row_ids(admitted.rows))
    with pytest.raises(StaleRowError, match="too late"):
        queue.ask(Written(0, admitted.rows))
    queue.tick(1.0)
    assert not unit.parts, "the late write is settled"
    assert store(queue, group(1, 2)) != row_ids(admitted.rows)


def small(rows: list[NewRow], **changes: Any) -> Admit:
    """A put whose cells come along."""
    return replaced(admit(rows), cells=b"".join(bytes(8 * len(row.cells["prompt_ids"])) for row in rows), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("units", [1, 2])
def test_a_small_put_is_written_by_the_controller_and_answered_when_every_unit_has_it(
    tmp_path: Path, units: int
) -> None:
    queue = site(tmp_path, units, replicas=units)
    put = queue.send(small(group(1, 2)))
    waiting = queue.send(Claim("rollout", None, None, 5.0))
    for unit in queue.units:
        assert queue.answer(put) is None
        assert queue.answer(waiting) is None
        unit.write_all()
    assert queue.answer(put).units == []
    claimed: Claimed = queue.answer(waiting)
    assert claimed.cells is not None
    assert unpack(claimed.cells.lengths, 1).tolist() == [[2], [2]]
    assert unpack(claimed.cells.starts, 1).tolist() == [[0], [16]]
    assert claimed.cells.data == bytes(32)


def test_what_the_controller_does_not_know_is_read(tmp_path: Path) -> None:
    queue = site(tmp_path)
    put = queue.send(small(group(1, 2)))
    queue.units[0].write_all()
    work(queue, "rollout", response_ids=3)
    assert queue.ask(Claim("reward", None, None, 0.0)).cells is None, "outputs are with the units alone"
    queue.send(small(group(2, 2)))
    queue.units[0].write_all()
    queue.start()
    assert queue.ask(Claim("rollout", None, None, 0.0)).cells is None
    assert queue.answer(put).units == [0], "asked again, the producer would write it itself"


@pytest.mark.parametrize("error", [StorageFull("no room"), PeerLost("silent"), QueueClosed("hung up")])
def test_a_small_put_that_a_unit_does_not_take_is_withdrawn(tmp_path: Path, error: TailraceError) -> None:
    queue = site(tmp_path, 2, replicas=2)
    first, second = queue.units
    put = queue.send(small(group(1, 2)))
    first.write_all()
    second.write_all(error)
    with pytest.raises(StorageFull if isinstance(error, StorageFull) else StaleRowError):
        queue.answer(put)
    queue.tick(1.0)
    assert stats(queue).rows == 0
    assert not first.parts
    again = queue.send(small(group(1, 2)))
    for unit in queue.units:
        unit.write_all()
    assert queue.answer(again) is not None


def test_a_small_put_whose_unit_dies_is_withdrawn(tmp_path: Path) -> None:
    queue = site(tmp_path)
    put = queue.send(small(group(1, 2)))
    queue.units[0].die()
    queue.join(queue.units[0])
    with pytest.raises(StaleRowError, match="units that were to have the rows are gone"):
        queue.answer(put)
    assert stats(queue).lost_groups == 0


def test_withdrawing_what_was_written_says_that_it_is_in(tmp_path: Path) -> None:
    queue = site(tmp_path)
    rows = store(queue, group(1, 2))
    assert queue.ask(Withdraw(pack(rows), ints([[1], [1]]))) == Withdrawn(False)
    assert stats(queue).rows == 2


def test_withdrawing_what_was_never_written_says_so_although_it_is_withdrawn_already(tmp_path: Path) -> None:
    queue = site(tmp_path)
    [unit] = queue.units
    admitted: Admitted = queue.ask(admit(group(1, 2)))
    unit.die()
    queue.join(unit)
    assert queue.ask(Withdraw(admitted.rows, ints([[1], [1]]))) == Withdrawn(True)
    assert stats(queue).lost_groups == 0, "it was never in"


def test_rows_of_a_unit_that_falls_silent_are_lost_and_put_again(tmp_path: Path) -> None:
    queue = site(tmp_path, 2)
    first, second = queue.units
    waiting = queue.send(Lost(1000.0))
    rows = store(queue, group(1, 2))
    lost, other = (first, second) if first.parts else (second, first)
    lease, held = claim(queue, "rollout")
    alive(queue, LIMIT_S + 1, other)
    answer: Groups = queue.answer(waiting)
    assert unpack(answer.ids, 1).tolist() == [[1]]
    assert stats(queue).lost_groups == 1
    assert [unit.number for unit in stats(queue).units] == [other.number]
    with pytest.raises(StaleRowError):
        ack(queue, lease, held, response_ids=3)
    assert set(rows).isdisjoint(store(queue, group(1, 2)))
    assert stats(queue).lost_groups == 0
    assert len(other.parts) == 2
    assert not lost.parts or lost.number != other.number


def test_a_lost_group_goes_before_those_who_wait_for_room(tmp_path: Path) -> None:
    queue = site(tmp_path, max_rows=2)
    [unit] = queue.units
    store(queue, group(1, 2))
    blocked = queue.send(replaced(admit(group(2, 2)), wait_s=100.0))
    assert "2 of 2 rows" in str(stats(queue).blocked_by)
    unit.die()
    queue.join(unit)
    assert stats(queue).lost_groups == 1
    assert queue.answer(blocked) is not None, "the loss made room"
    store(queue, group(1, 2))
    assert stats(queue).rows == 4, "the room that a lost group takes was its own before"


def replaced(message: Admit, **changes: Any) -> Admit:
    return Admit(**{**{field: getattr(message, field) for field in message.__struct_fields__}, **changes})


def test_with_replicas_a_dead_unit_loses_nothing(tmp_path: Path) -> None:
    queue = site(tmp_path, 2, replicas=2)
    rows = store(queue, group(1, 2))
    work(queue, "rollout", response_ids=3)
    alive(queue, LIMIT_S + 1, queue.units[0])
    assert (stats(queue).rows, stats(queue).lost_groups) == (2, 0)
    claimed: Claimed = queue.ask(Claim("reward", None, None, 0.0))
    assert unpack(claimed.units, 1).tolist() == [[queue.units[0].number]] * 2
    assert row_ids(pack(unpack(claimed.rows, 4)[:, :2])) == rows


def test_a_unit_that_missed_outputs_is_not_read_from_again(tmp_path: Path) -> None:
    queue = site(tmp_path, 2, replicas=2)
    store(queue, group(1, 1))
    lease, rows = claim(queue, "rollout")
    ack_missing(queue, lease, rows, {"response_ids": 3}, [1])
    claimed: Claimed = queue.ask(Claim("reward", None, None, 0.0))
    assert unpack(claimed.units, claimed.width).tolist() == [[0]]
    assert NO_UNIT not in unpack(claimed.units, claimed.width)


def test_a_unit_of_lasting_storage_keeps_its_rows_through_a_restart_and_learns_their_columns(tmp_path: Path) -> None:
    queue = site(tmp_path, lasting=True)
    [unit] = queue.units
    rows = store(queue, group(1, 2))
    lease, _ = claim(queue, "rollout")
    ack(queue, lease, rows, response_ids=3)
    unit.parts.add(PartId(7, 7, 0))
    unit.die()
    queue.join(unit)
    queue.tick(1.0)
    assert stats(queue).lost_groups == 0
    assert PartId(7, 7, 0) not in unit.parts, "of a row that is not there"
    assert unit.described == {
        **{PartId(*row, 0): ["prompt_ids"] for row in rows},
        **{PartId(*row, lease): ["response_ids"] for row in rows},
    }


def test_a_row_whose_outputs_a_unit_lacks_is_lost_with_its_group(tmp_path: Path) -> None:
    queue = site(tmp_path, lasting=True)
    [unit] = queue.units
    store(queue, group(1, 2))
    store(queue, group(2, 1))
    lease, rows = claim(queue, "rollout")
    ack(queue, lease, rows, response_ids=3)
    unit.parts.discard(PartId(*rows[0], lease))
    unit.die()
    queue.join(unit)
    assert (stats(queue).rows, stats(queue).lost_groups) == (1, 1)


def test_a_controller_that_is_started_anew_waits_for_its_units_up_to_their_limit(tmp_path: Path) -> None:
    queue = site(tmp_path, 2)
    first, second = queue.units
    store(queue, group(1, 2))
    store(queue, group(2, 2))
    queue.units = [first]
    queue.start()
    waiting = queue.send(Claim("rollout", None, None, 100.0))
    assert queue.answer(waiting) is None, "the second unit may come back"
    assert queue.controller.welcome().recovering
    alive(queue, LIMIT_S, first)
    claimed: Claimed = queue.answer(waiting)
    assert len(unpack(claimed.rows, 4)) == 2
    assert stats(queue).lost_groups == 1
    assert second.parts
    assert not queue.controller.welcome().recovering


def test_a_unit_that_joins_and_never_says_what_it_has_stops_nobody_for_long(tmp_path: Path) -> None:
    queue = site(tmp_path, 2)
    good, mute = queue.units
    store(queue, group(1, 1))
    store(queue, group(2, 1))
    mute.mute = True
    mute.die()
    queue.join(mute)
    assert len(claim(queue, "rollout", limit=1)[1]) == 1, "others are served at once"
    store(queue, group(3, 1))
    good.mute = True
    queue.start()
    waiting = queue.send(Claim("rollout", 1, None, 100.0))
    alive(queue, LIMIT_S - 1, good, mute)
    assert queue.answer(waiting) is None, "its rows may be there"
    alive(queue, 2, good, mute)
    assert stats(queue).rows == 0
    assert stats(queue).lost_groups == 3


def test_clients_are_told_of_a_unit_from_its_join_to_its_death(tmp_path: Path) -> None:
    queue = site(tmp_path)
    [unit] = queue.units
    unit.mute = True
    queue.start()
    assert [listed.number for listed in queue.controller.welcome().units] == [unit.number], "it answers, not ready yet"
    queue.tick(LIMIT_S)
    assert queue.controller.welcome().units == []


def test_a_controller_started_anew_learns_from_units_what_was_written_meanwhile(tmp_path: Path) -> None:
    queue = site(tmp_path)
    admitted: Admitted = queue.ask(admit(group(1, 2)))
    queue.units[0].parts.update(PartId(*row, 0) for row in row_ids(admitted.rows))
    queue.start()
    assert len(claim(queue, "rollout")[1]) == 2


def test_a_client_that_promised_signs_of_life_loses_its_leases_when_it_gives_none(tmp_path: Path) -> None:
    queue = site(tmp_path, lease_s=1000.0)
    store(queue, group(1, 2))
    for client in ("silent", "other"):
        queue.ask(Beat(5.0), client)
    lease, rows = claim(queue, "rollout", limit=1, client="silent")
    kept, _ = claim(queue, "rollout", client="other")
    waiting = queue.send(Claim("rollout", None, None, 50.0), "silent")
    for _ in range(8):
        queue.ask(Beat(5.0), "other")
        alive(queue, 1, *queue.units)
    counts = stats(queue).tasks["rollout"]
    assert (counts.ready, counts.leased, counts.expired, counts.claims) == (1, 1, 1, 0)
    assert queue.answer(waiting) is None
    with pytest.raises(LeaseError):
        queue.ask(Renew(lease), "silent")
    queue.ask(Renew(kept), "other")
    assert claim(queue, "rollout")[1] == rows


def test_a_watch_outlasts_the_controller(tmp_path: Path) -> None:
    queue = site(tmp_path, lease_s=1000.0)
    store(queue, group(1, 1))
    queue.ask(Beat(5.0), "silent")
    claim(queue, "rollout", client="silent")
    queue.start()
    assert stats(queue).tasks["rollout"].leased == 1
    alive(queue, 6, *queue.units)
    assert stats(queue).tasks["rollout"].ready == 1


def test_a_sign_of_life_may_be_given_for_another_client(tmp_path: Path) -> None:
    queue = site(tmp_path, lease_s=1000.0)
    store(queue, group(1, 1))
    claim(queue, "rollout", client="worker")
    for _ in range(8):
        queue.ask(Beat(5.0, "worker"), "its thread")
        alive(queue, 1, *queue.units)
    assert stats(queue).tasks["rollout"].leased == 1


def test_rows_for_later_weights_wait_for_them_and_nobody_waits_behind_them(tmp_path: Path) -> None:
    queue = site(tmp_path)
    later = [queue.send(replaced(admit(group(n, 1)), not_before=n, wait_s=100.0)) for n in (3, 2)]
    assert "for weight version 2, the newest is 0" in str(stats(queue).blocked_by)
    store(queue, group(7, 1))
    queue.ask(Advance(2))
    assert [queue.answer(ticket) is not None for ticket in later] == [False, True]
    queue.ask(Advance(1))
    assert stats(queue).version == 2
    queue.ask(Advance(3))
    assert queue.answer(later[0]) is not None
    assert stats(queue).blocked_puts == 0


def test_a_put_waits_for_room_in_bytes_and_is_told_so_when_its_time_is_over(tmp_path: Path) -> None:
    queue = site(tmp_path, max_bytes=100)
    store(queue, group(1, 1, prompt=8))
    waiting = queue.send(replaced(admit(group(2, 1, prompt=8)), wait_s=3.0))
    assert queue.answer(waiting) is None
    queue.tick(3.0)
    with pytest.raises(QueueTimeout, match="waited 3 s: 1 of 65536 rows and 64 of 100 bytes are taken"):
        queue.answer(waiting)
    with pytest.raises(QueueError, match=r"can never fit queue\.max_bytes 100"):
        queue.ask(admit(group(2, 1, prompt=20)))
    assert stats(queue).put_wait_s == 3.0


def test_no_unit_is_a_reason_to_wait(tmp_path: Path) -> None:
    queue = site(tmp_path)
    [unit] = queue.units
    queue.tick(LIMIT_S + 1)
    waiting = queue.send(replaced(admit(group(1, 1)), wait_s=100.0))
    assert "there are 0 units" in str(stats(queue).blocked_by)
    queue.join(unit)
    assert queue.answer(waiting) is not None


def test_a_claim_that_is_cancelled_gives_its_rows_back_whether_or_not_it_was_answered(tmp_path: Path) -> None:
    queue = site(tmp_path)
    waiting = queue.send(Claim("rollout", None, None, 100.0))
    queue.ask(Cancel(waiting.number))
    store(queue, group(1, 2))
    assert queue.answer(waiting) is None
    answered = queue.send(Claim("rollout", None, None, 100.0))
    assert stats(queue).tasks["rollout"].leased == 2
    queue.ask(Cancel(answered.number))
    assert stats(queue).tasks["rollout"].ready == 2


def test_outputs_of_a_lease_that_ended_are_settled(tmp_path: Path) -> None:
    queue = site(tmp_path, lease_s=5.0)
    [unit] = queue.units
    store(queue, group(1, 2))
    for end in (lambda lease: queue.ask(Nack(lease, None)), lambda lease: alive(queue, 6, unit)):
        lease, rows = claim(queue, "rollout")
        unit.parts.update(PartId(*row, lease) for row in rows)
        end(lease)
        queue.tick(0.5)
        assert {part.tag for part in unit.parts} == {0}


def test_a_snapshot_is_of_one_moment_and_its_parts_stay_until_it_was_read(tmp_path: Path) -> None:
    queue = site(tmp_path)
    [unit] = queue.units
    store(queue, group(1, 1))
    work(queue, "rollout", response_ids=3)
    work(queue, "reward", reward=1)
    exported: Exported = queue.ask(Export())
    lease, rows = claim(queue, "actor", limit=1)
    ack(queue, lease, rows)
    queue.tick(1.0)
    assert stats(queue).rows == 0
    assert len(unit.parts) == 3
    queue.ask(Release(exported.hold))
    queue.tick(1.0)
    assert not unit.parts
    assert [record.consumed.keys() for record in exported.state.rows] == [{0, 1}]


def test_a_reader_of_a_snapshot_that_dies_lets_go_of_it(tmp_path: Path) -> None:
    queue = site(tmp_path)
    store(queue, group(1, 1))
    queue.ask(Export(), "reader")
    work(queue, "rollout", response_ids=1)
    work(queue, "reward", reward=1)
    lease, rows = claim(queue, "actor", limit=1)
    ack(queue, lease, rows)
    queue.controller.gone("reader")
    queue.tick(1.0)
    assert not queue.units[0].parts


def test_puts_wait_while_a_snapshot_is_restored_and_a_second_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    old = site(tmp_path / "old")
    store(old, group(1, 2))
    state = old.ask(Export()).state
    queue = site(tmp_path)
    admitted: Admitted = queue.ask(Restore(state))
    waiting = queue.send(replaced(admit(group(2, 1)), wait_s=100.0))
    assert "being restored" in str(stats(queue).blocked_by)
    with pytest.raises(QueueError, match="another snapshot"):
        queue.ask(Restore(state))
    write(queue, admitted)
    assert queue.answer(waiting) is not None
    assert stats(queue).tasks["rollout"].ready == 2
    with pytest.raises(QueueError, match="has held rows"):
        queue.ask(Restore(state))


def test_a_closed_queue_sends_everybody_away_and_stays_closed(tmp_path: Path) -> None:
    queue = site(tmp_path)
    store(queue, group(1, 1))
    lease, rows = claim(queue, "rollout")
    waiting = [queue.send(message) for message in (Claim("reward", None, None, 9.0), Lost(9.0))]
    queue.ask(Close())
    for ticket in waiting:
        with pytest.raises(QueueClosed):
            queue.answer(ticket)
    ack(queue, lease, rows, response_ids=2)
    queue.start()
    for message in (admit(group(2, 1)), Claim("rollout", None, None, 9.0), Lost(9.0)):
        with pytest.raises(QueueClosed):
            queue.ask(message)


@pytest.mark.parametrize(
    ("message", "error", "text"),
    [
        (Claim("nobody", None, None, 0.0), QueueError, "no task 'nobody'"),
        (Claim("rollout", 0, None, 0.0), QueueError, "at least 1, got 0"),
        (Claim("rollout", None, 3, 0.0), QueueError, "leave rank out"),
        (Renew(99), LeaseError, "99"),
        (Nack(99, pack([RowId(0, 0)])), LeaseError, "not under lease 99"),
        (Ack(99, pack([RowId(5, 5)]), ints([[-1]]), [], []), StaleRowError, "gone"),
        (Ack(99, b"123", b"", [], []), WireError, "3 bytes are not rows"),
        (replaced(admit(group(1, 1)), rows=b""), QueueError, "a put of no rows"),
        (replaced(admit(group(1, 1)), cells=b"123"), WireError, "16 bytes were announced, and 3 came"),
        (replaced(admit(group(1, 2)), rows=ints([[1, 2, 0]])), WireError, "1 rows come with 2 versions"),
        (replaced(admit(group(1, 1)), runs=one_run({"prompt_ids": -1}, 1)), ColumnError, "length -1"),
        (replaced(admit(group(1, 1)), runs=one_run({"seed": 1}, 1)), ColumnError, "lack column 'prompt_ids'"),
        (
            replaced(admit(group(1, 1)), runs=one_run({"prompt_ids": 1, "reward": 1}, 1)),
            ColumnError,
            "bring column 'reward'",
        ),
        (replaced(admit(group(1, 1)), runs=one_run({"prompt_ids": 1, "x": 1}, 1)), ColumnError, "unknown column 'x'"),
    ],
)
def test_bad_requests_are_refused_and_change_nothing(
    tmp_path: Path, message: object, error: type[Exception], text: str
) -> None:
    queue = site(tmp_path)
    store(queue, group(9, 1))
    before = stats(queue)
    with pytest.raises(error, match=text):
        queue.ask(message)  # type: ignore[arg-type]
    assert stats(queue) == before


def test_a_table_of_another_journal_is_refused(tmp_path: Path) -> None:
    queue = site(tmp_path)
    store(queue, group(1, 1))
    with pytest.raises(QueueError, match="another table"):
        Site(lambda: table()[:2], tmp_path)


def test_versions_of_rows_that_are_written_are_known_to_policies(tmp_path: Path) -> None:
    queue = site(tmp_path)
    rows = group(1, 1)
    message = replaced(admit(rows), versions=pack(np.array([4], dtype=np.int64)))
    write(queue, queue.ask(message))
    [record] = queue.ask(Export()).state.rows
    assert record.facts.version == 4


def test_a_lasting_unit_that_was_dead_is_another_one_when_it_comes_back_also_after_a_restart(tmp_path: Path) -> None:
    queue = site(tmp_path, lasting=True)
    [unit] = queue.units
    store(queue, group(1, 1))
    queue.tick(LIMIT_S + 1)
    queue.join(unit)
    queue.tick(1.0)
    assert not unit.parts, "its rows were lost"
    rows = store(queue, group(1, 1))
    queue.start()
    queue.tick(1.0)
    assert unit.parts == {PartId(*row, 0) for row in rows}
    assert claim(queue, "rollout")[1] == rows


def test_no_unit_gets_the_number_of_one_that_has_died(tmp_path: Path) -> None:
    queue = site(tmp_path)
    [unit] = queue.units
    numbers = [unit.number]
    for restart in (False, True, True):
        unit.die()
        queue.join(unit)
        if restart:
            queue.start()
        numbers.append(unit.number)
    assert numbers == [0, 1, 2, 3]


def test_groups_that_are_leased_bar_nobody_after_a_restart(tmp_path: Path) -> None:
    queue = Site(lambda: table(FirstIn(9), actor=TokenBudget(1, in_order=True)), tmp_path, unit_limit_s=LIMIT_S)
    for number in (1, 2):
        store(queue, group(number, 2))
    work(queue, "rollout", response_ids=1)
    for _ in range(2):
        work(queue, "reward", reward=1)
    lease, first = claim(queue, "actor", limit=2)
    queue.start()
    _, second = claim(queue, "actor", limit=2)
    assert len(second) == 2
    ack(queue, lease, first)
    assert stats(queue).rows == 2


def test_a_batch_that_was_split_is_split_anew_after_a_restart(tmp_path: Path) -> None:
    """No rank keeps its part while the other waits for its own for ever."""

    def tasks() -> tuple[QueueTask, ...]:
        return one_task(BalancedByLength(2, 4, partition=lpt, cost_columns=("prompt_ids",)))

    queue = Site(tasks, tmp_path, unit_limit_s=LIMIT_S)
    store(queue, group(1, 4))
    first: Claimed = queue.ask(Claim("only", None, 0, 0.0))
    queue.start()
    with pytest.raises(LeaseError):
        queue.ask(Renew(first.lease_id))
    parts = [len(unpack(queue.ask(Claim("only", None, rank, 0.0)).rows, 4)) for rank in (1, 0)]
    assert parts == [2, 2]


def test_a_snapshot_whose_restoring_broke_off_is_restored_by_another_try(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    old = site(tmp_path / "old")
    store(old, group(1, 2))
    state = old.ask(Export()).state
    queue = site(tmp_path)
    [unit] = queue.units
    admitted: Admitted = queue.ask(Restore(state), "dies")
    unit.parts.update(PartId(*row, 0) for row in row_ids(admitted.rows))
    queue.controller.gone("dies")
    queue.tick(1.0)
    assert (unit.parts, unit.left) == (set(), set())
    queue.ask(Restore(state), "dies with the controller")
    unit.parts.update(PartId(*row, 0) for row in row_ids(admitted.rows))
    queue.start()
    queue.tick(1.0)
    assert (unit.parts, unit.left) == (set(), set()), "told that they have left, it would take them never again"
    write(queue, queue.ask(Restore(state)))
    assert stats(queue).tasks["rollout"].ready == 2


def test_a_snapshot_takes_no_weight_version_back(tmp_path: Path) -> None:
    queue = site(tmp_path)
    state = queue.ask(Export()).state
    queue.ask(Advance(5))
    queue.ask(Restore(state))
    assert stats(queue).version == 5


def test_leases_of_lost_rows_are_forgotten(tmp_path: Path) -> None:
    queue = site(tmp_path)
    store(queue, group(1, 2))
    claim(queue, "rollout")
    queue.units[0].die()
    queue.join(queue.units[0])
    assert queue.controller._claims.leases() == []
    assert not queue.controller._claims._holders


def test_a_snapshot_that_nobody_lets_go_of_is_held_for_as_long_as_a_lease(tmp_path: Path) -> None:
    queue = site(tmp_path, lease_s=5.0)
    store(queue, group(1, 1))
    queue.ask(Export())
    work(queue, "rollout", response_ids=1)
    work(queue, "reward", reward=1)
    lease, rows = claim(queue, "actor", limit=1)
    ack(queue, lease, rows)
    alive(queue, 4, *queue.units)
    assert queue.units[0].parts
    alive(queue, 2, *queue.units)
    assert not queue.units[0].parts


def test_a_unit_that_fails_to_forget_parts_is_asked_what_it_has(tmp_path: Path) -> None:
    queue = site(tmp_path)
    [unit] = queue.units
    store(queue, group(1, 1))
    for task, lengths in (("rollout", {"response_ids": 1}), ("reward", {"reward": 1})):
        work(queue, task, **lengths)
    unit.failures = [PeerLost("silent")]
    lease, rows = claim(queue, "actor", limit=1)
    ack(queue, lease, rows)
    queue.tick(1.0)
    assert unit.parts
    alive(queue, 2, unit)
    assert not unit.parts
