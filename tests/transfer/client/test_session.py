"""A repeated failure is reported once, long before the client gives up."""

import logging

import pytest

from tailrace.errors import StorageFull
from tailrace.transfer.queue.base import Claim, Row, RowId
from tailrace.transfer.queue.client.session import Acked, LikelyUnits, Tries
from tailrace.transfer.queue.messages import Unit

UNITS = [Unit(number, [f"tcp://unit:{number}"], "here", "") for number in range(3)]
FULL = StorageFull("no room for a write of 9 bytes")


def test_what_keeps_failing_is_told_once_and_raised_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    now, told_at = 0.0, None
    tries = Tries(lambda: now, timeout=60.0)
    with caplog.at_level(logging.WARNING):
        while tries.left_s:
            now += sum(step.pause_s for step in tries.again(FULL))
            if told_at is None and caplog.messages:
                told_at = now
        with pytest.raises(StorageFull):
            list(tries.again(FULL))
    assert told_at is not None
    assert 10.0 <= told_at < 13.0
    assert now == pytest.approx(60.0)
    [message] = caplog.messages
    assert message.startswith(f"{FULL}; tried again for another ")


def test_a_put_that_the_controller_writes_says_nothing_of_the_replicas() -> None:
    likely = LikelyUnits()
    assert len(likely.among(UNITS)) == 1
    likely.learn(0.0, 2)
    likely.learn(0.0, 0)
    assert len(likely.among(UNITS)) == 2
    likely.learn(0.5, 0)
    assert likely.among(UNITS) == [], "puts have to wait"


def test_what_was_acked_is_remembered_of_the_leases_that_anybody_is_at() -> None:
    acked = Acked()
    for lease in range(10_000):
        acked.add(lease, 1)

    def claim(lease: int) -> Claim:
        row = Row(id=RowId(lease, 0), group_id=1, order=1, cells={})
        return Claim(lease_id=lease, lease_s=1.0, task="only", rows=(row,))

    assert acked.all_of(claim(9999))
    assert not acked.all_of(claim(0))
