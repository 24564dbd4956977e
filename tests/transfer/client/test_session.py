"""What fails again and again is told, once, long before it is given up."""

import logging

import pytest

from tailrace.errors import StorageFull
from tailrace.transfer.queue.client.session import Tries

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
