"""Rows in the order of the run."""

from tailrace.transfer.queue.policies.first_in import FirstIn
from tests.transfer.policies.rows import fill, orders_of, rows_of


def test_first_in_takes_the_smallest_orders() -> None:
    policy = FirstIn(3)
    fill(policy, rows_of(2, 1, 1), rows_of(1, 1, 1))
    assert orders_of(policy.take(None)) == [100, 101, 200]
    assert orders_of(policy.take(None)) == [201]
    assert policy.take(None) == []
