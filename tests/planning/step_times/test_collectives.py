"""Claims on exchanges among devices."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.planning.hardware.clusters import open_cluster
from tailrace.planning.step_times.collectives import Group, all_gather_s, all_reduce_s

POOL = open_cluster("16xH100").pools[0]
BUS = open_cluster("8xA40").pools[0]


def test_small_tensors_are_summed_at_one_latency() -> None:
    assert all_reduce_s(1024, Group.of(POOL, 8)) == pytest.approx(POOL.inside.latency_s, rel=0.01)


def test_large_tensors_are_scattered_and_gathered() -> None:
    group = Group.of(POOL, 8)
    assert all_reduce_s(1e9, group) == 2 * all_gather_s(1e9, group)
    assert all_reduce_s(1e9, group) == pytest.approx(2 * 7 / 8 * 1e9 / POOL.inside.bytes_per_s, rel=0.01)


def test_a_sum_on_a_bus_waits_for_each_step_of_a_ring() -> None:
    waits = [all_reduce_s(0, Group.of(BUS, devices)) / BUS.inside.latency_s for devices in (2, 4, 8)]
    assert waits == pytest.approx([2, 6, 14])
    whole = all_reduce_s(1e9, Group.of(BUS, 8)) - all_reduce_s(0, Group.of(BUS, 8))
    assert whole == pytest.approx(2 * 7 / 8 * 1e9 / BUS.inside.bytes_per_s), "the bytes are those of any other exchange"


def test_a_switch_is_never_slower_than_a_bus_with_the_same_links() -> None:
    bus = Group.of(BUS, 8)
    for size in (0.0, 1e3, 1e6, 1e9):
        assert all_reduce_s(size, replace(bus, switched=True)) < all_reduce_s(size, bus)


def test_one_device_exchanges_nothing() -> None:
    assert all_reduce_s(1e9, Group.of(POOL, 1)) == 0


@given(st.floats(0, 1e10), st.floats(0, 1e10), st.sampled_from([2, 4, 8, 16]))
def test_more_bytes_never_take_less_time(first: float, second: float, devices: int) -> None:
    small, large = sorted((first, second))
    for group in (Group.of(POOL, devices), Group.of(BUS, min(8, devices))):
        assert all_reduce_s(small, group) <= all_reduce_s(large, group)
