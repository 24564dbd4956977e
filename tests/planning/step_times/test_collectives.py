"""Claims on exchanges among devices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.planning.hardware.clusters import open_cluster
from tailrace.planning.step_times.collectives import Group, all_gather_s, all_reduce_s

POOL = open_cluster("16xH100").pools[0]


def test_small_tensors_are_summed_at_one_latency() -> None:
    assert all_reduce_s(1024, Group.of(POOL, 8)) == pytest.approx(POOL.inside.latency_s, rel=0.01)


def test_large_tensors_are_scattered_and_gathered() -> None:
    group = Group.of(POOL, 8)
    assert all_reduce_s(1e9, group) == 2 * all_gather_s(1e9, group)
    assert all_reduce_s(1e9, group) == pytest.approx(2 * 7 / 8 * 1e9 / POOL.inside.bytes_per_s, rel=0.01)


def test_one_device_exchanges_nothing() -> None:
    assert all_reduce_s(1e9, Group.of(POOL, 1)) == 0


@given(st.floats(0, 1e10), st.floats(0, 1e10), st.sampled_from([2, 4, 8, 16]))
def test_more_bytes_never_take_less_time(first: float, second: float, devices: int) -> None:
    small, large = sorted((first, second))
    group = Group.of(POOL, devices)
    assert all_reduce_s(small, group) <= all_reduce_s(large, group)
