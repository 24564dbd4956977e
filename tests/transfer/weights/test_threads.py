"""Values that threads share."""

import threading

import pytest

from tailrace.transfer.weights.threads import Guarded


def test_a_guarded_value_has_one_thread_at_a_time() -> None:
    counts, turns = Guarded([0]), 2000

    def count() -> None:
        for _ in range(turns):
            with counts as value:
                assert not counts._lock.acquire(blocking=False)
                value[0] += 1

    threads = [threading.Thread(target=count) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with counts as value:
        assert value == [len(threads) * turns]


def test_a_block_that_raises_lets_the_next_thread_in() -> None:
    guarded = Guarded(1)
    with pytest.raises(ZeroDivisionError), guarded as value:
        raise ZeroDivisionError(value)
    with guarded as value:
        assert value == 1
