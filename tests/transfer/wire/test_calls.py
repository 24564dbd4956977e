"""What a client asks whom, in which order; the answers are made here."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tailrace.errors import LeaseError, WireError
from tailrace.transfer.queue.base import QueueStats, RowId
from tailrace.transfer.queue.wire import calls
from tailrace.transfer.queue.wire.calls import Batch, Directory, Operation, Step
from tailrace.transfer.queue.wire.frames import Reply
from tailrace.transfer.queue.wire.messages import (
    Accepted,
    Ack,
    Admit,
    Admitted,
    Answer,
    Cells,
    Claim,
    Claimed,
    Counted,
    Done,
    Look,
    Nack,
    Read,
    Renew,
    Unit,
    Welcome,
    Write,
)
from tailrace.transfer.queue.wire.sockets import host_id
from tests.transfer.wire.rows import batch, ints, packed

HERE, THERE = Unit(0, ["tcp://a:1", "ipc:///a"], host_id(), ""), Unit(3, ["ipc:///b", "tcp://b:1"], "elsewhere", "")
WELCOME = Welcome(1, [HERE, THERE])


class Play:
    """Runs an operation, answer by answer."""

    def __init__(self, operation: Operation[Any]) -> None:
        self._operation = operation
        self.step: Step = next(operation)
        self.result: Any = None

    def asked(self) -> list[tuple[str, type]]:
        return [(call.to, type(call.message)) for call in self.step.calls]

    def answer(self, *answers: Answer) -> None:
        try:
            self.step = self._operation.send([Reply(answer) for answer in answers])
        except StopIteration as stop:
            self.step, self.result = Step([]), stop.value

    def fail(self, error: Exception) -> None:
        self.step = self._operation.throw(error)


def directory() -> Directory:
    """One that has looked."""
    known = Directory("controller")
    looking = Play(known.look())
    assert looking.asked() == [("controller", Look)]
    looking.answer(WELCOME)
    return known


def claimed(units: Sequence[int]) -> Claimed:
    rows = packed([[slot, 0, 1, slot] for slot in range(len(units))])
    return Claimed(9, 60.0, rows, packed(list(units)), ["prompt_ids"], packed([[0]] * len(units)))


def test_a_put_is_admitted_then_written_to_the_unit_that_the_controller_names() -> None:
    rows = batch(ints([1, 2]), ints([3]))
    play = Play(calls.put(directory(), rows, wait_s=5.0))
    [admit] = play.step.calls
    assert isinstance(admit.message, Admit)
    assert (admit.to, admit.wait_s, admit.message.wait_s) == ("controller", 5.0, 5.0)
    play.answer(Admitted(packed([[4, 1], [5, 0]]), 3))
    [write] = play.step.calls
    assert write.message == Write(0, packed([[4, 1], [5, 0]]), list(rows.runs), None)
    assert (write.to, write.frames) == ("tcp://b:1", rows.frames)
    play.answer(Accepted())
    assert play.result == [RowId(4, 1), RowId(5, 0)]


def test_a_unit_of_this_host_is_reached_by_ipc_and_one_that_only_listens_there_from_no_other() -> None:
    play = Play(calls.done(directory(), 0, [8]))
    assert play.asked() == [("ipc:///a", Done)]
    known = Directory("controller")
    looking = Play(known.look())
    looking.answer(Welcome(1, [Unit(1, ["ipc:///c"], "elsewhere", "")]))
    with pytest.raises(WireError, match="cannot be reached from this host"):
        Play(calls.done(known, 1, [8]))


def test_the_controller_is_asked_for_a_unit_that_is_not_known_and_may_not_know_it_either() -> None:
    play = Play(calls.done(Directory("controller"), 3, [8]))
    assert play.asked() == [("controller", Look)]
    play.answer(WELCOME)
    assert play.asked() == [("tcp://b:1", Done)]
    play = Play(calls.done(directory(), 8, [1]))
    with pytest.raises(WireError, match=r"named unit 8, but its units are \[0, 3\]"):
        play.answer(WELCOME)


def test_a_claim_reads_from_every_unit_at_once_and_says_which_rows_came_from_where() -> None:
    play = Play(calls.claim(directory(), "actor", limit=4, rank=1, wait_s=2.0))
    [claim] = play.step.calls
    assert claim.message == Claim("actor", 4, 1, 2.0)
    play.answer(claimed([3, 0, 3]))
    assert play.asked() == [("ipc:///a", Read), ("tcp://b:1", Read)]
    assert play.step.calls[1].message == Read(packed([[0, 0], [2, 0]]), ["prompt_ids"], packed([[0], [0]]), False)
    cells = Cells(packed([[1]]), packed([[[0, 0]]]), [], None)
    play.answer(cells, cells)
    lease, found = play.result
    assert lease.lease_id == 9
    assert [(part.unit, part.places.tolist()) for part in found] == [(0, [1]), (3, [0, 2])]


def test_a_lease_whose_cells_do_not_come_is_given_back() -> None:
    play = Play(calls.claim(directory(), "actor", limit=None, rank=None, wait_s=2.0))
    play.answer(claimed([0]))
    [give_back] = play.step.otherwise
    assert (give_back.to, give_back.message) == ("controller", Nack(9, None))
    play = Play(calls.claim(directory(), "actor", limit=None, rank=None, wait_s=2.0))
    play.answer(claimed([8]))
    play.answer(WELCOME)
    assert [call.message for call in play.step.calls] == [Nack(9, None)], "its unit is not known"
    with pytest.raises(WireError, match="named unit 8"):
        play.answer(Accepted())


def test_outputs_are_written_before_they_are_acked() -> None:
    first, second = batch(ints([1])), batch(ints([2]), ints([3]))
    outputs = {0: Batch(ints([[1, 0]]), first.versions, first.runs, first.frames)}
    outputs[3] = Batch(ints([[2, 0], [3, 0]]), second.versions, second.runs, second.frames)
    play = Play(calls.ack(directory(), 9, outputs))
    assert play.asked() == [("ipc:///a", Write), ("tcp://b:1", Write)]
    play.answer(Accepted(), Accepted())
    [call] = play.step.calls
    rows, versions = packed([[1, 0], [2, 0], [3, 0]]), packed([-1, -1, -1])
    assert call.message == Ack(9, rows, versions, [*first.runs, *second.runs])
    play.answer(Accepted())


def test_rows_without_output_cells_are_acked_without_a_write() -> None:
    outputs = {0: Batch(ints([[1, 0]]), ints([-1]), [], [])}
    play = Play(calls.ack(directory(), 9, outputs))
    assert play.asked() == []
    play.answer()
    assert play.asked() == [("controller", Ack)]


def test_the_short_ones_ask_the_controller() -> None:
    known = directory()
    assert Play(calls.nack(known, 9, None)).step.calls[0].message == Nack(9, None)
    assert Play(calls.nack(known, 9, [RowId(1, 2)])).step.calls[0].message == Nack(9, packed([[1, 2]]))
    assert Play(calls.renew(known, 9)).step.calls[0].message == Renew(9)
    play = Play(calls.stats(known))
    counts = QueueStats(rows=1, bytes=2, blocked_puts=0, tasks={})
    play.answer(Counted(counts))
    assert play.result == counts


def test_an_error_is_raised_where_it_was_asked_for_and_a_wrong_answer_is_one() -> None:
    with pytest.raises(LeaseError):
        Play(calls.renew(directory(), 9)).fail(LeaseError("gone"))
    with pytest.raises(WireError, match="got the answer Admitted, expected Accepted"):
        Play(calls.renew(directory(), 9)).answer(Admitted(b"", 0))


def test_packed_lengths_of_a_batch_are_those_of_its_cells() -> None:
    np.testing.assert_array_equal(batch(ints([1, 2]), ints([3])).runs[0].table(), ints([[2], [1]]))
