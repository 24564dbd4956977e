"""Claims on the profile of engines that are not there."""

import pytest

from tailrace.planning.hardware.base import Pool
from tailrace.planning.hardware.clusters import open_cluster
from tailrace.planning.latency import LatencyPredictor
from tailrace.planning.model_shape.catalogue import find_shape
from tailrace.planning.step_times.generation import AnalyticStepTimes
from tailrace.planning.step_times.predicted_profile import degrees_of, predicted_profile
from tailrace.planning.tp_profile import SwitchCost, TPProfile

SHAPE = find_shape("Qwen2.5-7B")
WEIGHTS = 2 * SHAPE.parameters
CACHE = {1: 1e5, 2: 2e5, 4: 4e5}


def pool(cluster: str = "8xH100") -> Pool:
    return open_cluster(cluster).pools[0]


def profile(pool: Pool) -> TPProfile:
    times = AnalyticStepTimes(SHAPE, pool)
    return predicted_profile(times, SHAPE, pool, ranks=4, cache_tokens=CACHE, slots=256, longest=4096, step_tokens=8192)


def cost(pool: Pool, source: int, target: int) -> SwitchCost:
    return next(c for c in profile(pool).switches if (c.source_tp, c.target_tp) == (source, target))


def test_its_steps_are_those_that_were_predicted() -> None:
    found, times = profile(pool()), AnalyticStepTimes(SHAPE, pool())
    predictor = LatencyPredictor(found)
    assert found.degrees == (1, 2, 4)
    for tp in found.degrees:
        for size, context in ((1, 1000), (48, 48 * 700), (200, 200 * 450)):
            expected = times.step_s(tp, size, context, 4 // tp)
            assert predictor.step_s(tp, size, context, 4 // tp) == pytest.approx(expected, rel=0.05)


def test_a_switch_gathers_the_weights_of_a_replica_and_copies_a_part() -> None:
    device = pool().device
    copied_s = {tp: 2 * WEIGHTS / tp / (device.memory_gb_s * 1e9) for tp in CACHE}
    assert cost(pool(), 1, 2).reshard_s == pytest.approx(copied_s[2]), "a rank has all"
    gathered_s = WEIGHTS / 2 / (device.link_gb_s * 1e9) + device.link_us * 1e-6
    assert cost(pool(), 2, 4).reshard_s == pytest.approx(gathered_s + copied_s[4])


def test_keys_and_values_go_to_all_ranks_that_meet() -> None:
    rate = pool().device.link_gb_s * 1e9
    assert cost(pool(), 1, 2).kv_bytes_per_s == pytest.approx(rate, rel=0.01)
    assert cost(pool(), 2, 4).kv_bytes_per_s == pytest.approx(rate / 3, rel=0.01)


def test_slower_links_make_switches_dearer() -> None:
    fast, slow = (cost(pool(cluster), 4, 2) for cluster in ("8xH100", "8xL40S"))
    assert slow.reshard_s > fast.reshard_s
    assert slow.kv_bytes_per_s < fast.kv_bytes_per_s


def test_degrees_divide_ranks_and_heads() -> None:
    assert degrees_of(SHAPE, 8) == [1, 2, 4], "it has 28 heads"
    assert degrees_of(find_shape("Qwen2.5-32B"), 8) == [1, 2, 4, 8]
