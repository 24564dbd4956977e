from collections.abc import Sequence
from pathlib import Path

import msgspec
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
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.messages import (
    Ack,
    Admitted,
    Advance,
    Claim,
    Claimed,
    Close,
    Dismiss,
    Export,
    Lost,
    Nack,
    Renew,
    Withdraw,
    Withdrawn,
    Written,
    pack,
    row_ids,
    unpack,
)
from tailrace.transfer.queue.policies.first_in import FirstIn
from tailrace.transfer.queue.storage.base import PartId
from tailrace.transfer.wire.messages import Beat, Cancel
from tests.transfer.controller.fakes import FakeUnit, Site
from tests.transfer.controller.talk import LIMIT_S, ack, alive, claim, replaced, site, small, stats, store, work, write
from tests.transfer.controller.test_controller_machine import admit, ints, one_run
from tests.transfer.tables import group, table


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


def test_rows_go_where_their_producer_has_room_for_them_unless_that_unit_has_much_more_than_others(
    tmp_path: Path,
) -> None:
    queue = site(tmp_path, 2)

    def put(number: int, *preferred: int, full: Sequence[int] = ()) -> int:
        request = msgspec.structs.replace(admit(group(number, 2)), preferred=list(preferred), full=list(full))
        admitted: Admitted = queue.ask(request)
        write(queue, admitted)
        [unit] = admitted.units
        return unit

    assert [put(1, 1), put(2, 1), put(3, 1)] == [1, 1, 0], "never more than the rows of one put ahead"
    assert [put(4), put(5, 7)] == [0, 0], "nobody prefers, or one that is not there"
    assert [put(6, full=[0]), put(7, full=[0, 1])] == [1, 0], "a full one is the last to be tried"


@pytest.mark.parametrize(
    "end",
    [
        lambda queue, admitted: queue.ask(Withdraw(admitted.rows, ints([[1], [1]]))),
        lambda queue, admitted: queue.ask(Cancel(queue._numbers)),
        lambda queue, admitted: queue.tick(queue.controller._context.config.lease_s),
        lambda queue, admitted: queue.ask(Dismiss("client")),
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


def test_a_small_put_goes_to_another_unit_than_the_one_that_had_no_room(tmp_path: Path) -> None:
    queue = site(tmp_path, 2)
    queue.send(small(group(1, 2)))
    full, other = sorted(queue.units, key=lambda unit: not unit.writes)
    full.write_all(StorageFull("no room"))
    queue.send(small(group(1, 2)))
    assert other.writes
    assert not full.writes
    other.write_all()
    queue.tick(6.0)
    queue.send(small(group(2, 2)))
    assert full.writes, "it may have room again"


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
    assert queue.server.answers.cancelled == [waiting], "it comes again if the client was only stopped for a while"
    with pytest.raises(LeaseError):
        queue.ask(Renew(lease), "silent")
    queue.ask(Renew(kept), "other")
    assert claim(queue, "rollout")[1] == rows


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


def test_a_claim_whose_time_is_over_is_told_in_words_what_its_rows_lack(tmp_path: Path) -> None:
    queue = site(tmp_path)
    store(queue, group(1, 3))
    claim(queue, "rollout", limit=1)
    waiting = queue.send(Claim("reward", None, None, 2.99987))  # the rest of 3 s when the message leaves
    queue.tick(3.0)
    with pytest.raises(
        QueueTimeout,
        match=r"^claim of task 'reward' waited 3 s: of its rows 3 lack inputs, 0 are ready and 0 leased; .* raise",
    ):
        queue.answer(waiting)


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


@pytest.mark.parametrize("units", [1, 2])
def test_a_small_put_that_is_cancelled_while_the_controller_writes_it_is_withdrawn(tmp_path: Path, units: int) -> None:
    queue = site(tmp_path, units, replicas=units)
    put = queue.send(small(group(1, 2)))
    if units > 1:
        queue.units[0].write_all()
    queue.ask(Cancel(put.number))
    for unit in queue.units:
        unit.write_all()
    queue.tick(1.0)
    assert (stats(queue).rows, stats(queue).bytes) == (0, 0)
    assert not any(unit.parts for unit in queue.units), "what was written all the same is settled"
    again = queue.send(small(group(1, 2)))
    for unit in queue.units:
        unit.write_all()
    assert queue.answer(again).units == [], "its group may come again"


def test_a_small_put_that_is_cancelled_before_or_after_the_controller_writes_it_is_out_or_in_as_a_whole(
    tmp_path: Path,
) -> None:
    queue = site(tmp_path)
    [unit] = queue.units
    waiting = queue.send(small(group(1, 2), not_before=1, wait_s=100.0))
    queue.ask(Cancel(waiting.number))
    queue.ask(Advance(1))
    assert (unit.writes, stats(queue).rows) == ([], 0)
    entered = queue.send(small(group(1, 2)))
    unit.write_all()
    queue.ask(Cancel(entered.number))
    assert stats(queue).tasks["rollout"].ready == 2, "somebody may have claimed them already"


def test_a_small_put_that_is_cancelled_after_the_controller_was_started_anew_is_withdrawn(tmp_path: Path) -> None:
    queue = site(tmp_path)
    put = queue.send(small(group(1, 2)))
    queue.start()
    queue.ask(Cancel(put.number))
    assert stats(queue).rows == 0


def test_a_connection_that_is_silent_is_no_holder_that_is_dead(tmp_path: Path) -> None:
    queue = site(tmp_path, lease_s=5.0)
    store(queue, group(1, 2))
    lease, rows = claim(queue, "rollout", client="holder")
    waiting = queue.send(Claim("reward", None, None, 100.0), "holder")
    queue.controller.gone("holder")
    ack(queue, lease, rows[:1], response_ids=1)
    assert queue.answer(waiting) is None, "nobody would hear of what it is given"
    for _ in range(3):
        alive(queue, 4, *queue.units)
        queue.ask(Renew(lease), "holder, by another connection")
    ack(queue, lease, rows[1:], response_ids=1)
    assert stats(queue).tasks["rollout"].consumed == 2


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
        (Claim("rollout", None, 3, 0.0), QueueError, "policy 'first_in' splits nothing"),
        (Renew(99), LeaseError, "99"),
        (Nack(99, pack([RowId(0, 0)])), LeaseError, "not under lease 99"),
        (Ack(99, pack([RowId(5, 5)]), ints([[-1]]), [], []), StaleRowError, "gone"),
        (Ack(99, b"123", b"", [], []), WireError, "3 bytes are not rows"),
        (replaced(admit(group(1, 1)), rows=b""), QueueError, "a put of no rows"),
        (replaced(admit(group(1, 1)), runs=[]), WireError, "a put of 1 rows tells nothing of their cells"),
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


def test_versions_of_rows_that_are_written_are_known_to_policies(tmp_path: Path) -> None:
    queue = site(tmp_path)
    rows = group(1, 1)
    message = replaced(admit(rows), versions=pack(np.array([4], dtype=np.int64)))
    write(queue, queue.ask(message))
    [record] = queue.ask(Export()).state.rows
    assert record.facts.version == 4


@pytest.mark.parametrize("others", [(), (2**19,), (2**22,)])
def test_a_put_that_no_unit_could_ever_hold_is_refused_with_the_key(tmp_path: Path, others: tuple[int, ...]) -> None:
    units = [FakeUnit(str(number), max_bytes=nbytes) for number, nbytes in enumerate((2**20, *others))]
    storage = {"type": "memory", "max_bytes": 2**20}
    queue = Site(lambda: table(FirstIn(9)), tmp_path, units=units, unit_limit_s=LIMIT_S, storage=storage)
    most = max(2**20, *others, 0)
    with pytest.raises(
        QueueError, match=rf"1 rows and {most + 8} bytes can never .* raise queue.storage.max_bytes, {most}"
    ):
        queue.ask(admit(group(1, prompt=most // 8 + 1)))
    store(queue, group(1, prompt=most // 8))
    waiting = queue.send(replaced(admit(group(2, prompt=most // 8)), wait_s=100.0))
    assert queue.answer(waiting) is None, "it waits for room"
