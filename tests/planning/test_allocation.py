"""Claims on the devices that generate and that train."""

from dataclasses import replace

import pytest

from tailrace.errors import PlanError
from tailrace.planning.allocation import Batches, Engines, best_layout, engine_tokens, layouts, least_tp, mean_batches
from tailrace.planning.hardware.clusters import open_cluster
from tailrace.planning.memory import trainer_memory
from tailrace.planning.model_shape.catalogue import find_shape
from tailrace.planning.step_times.training import AnalyticTrainingTimes
from tailrace.planning.step_times.training_setup import TrainingSetup

BATCHES = Batches(tokens=2e6, mean_length=2000, micro_batch_tokens=16_384, longest=12_000)
ENGINES = Engines(pool=open_cluster("8xH100").pools[0], engines=1, slots=256, cache_tokens=0)


def test_arrangements_have_all_devices_and_tp_stays_in_a_node() -> None:
    pool = open_cluster("32xH100").pools[0]
    found = list(layouts(find_shape("Qwen2.5-7B"), pool, 32))
    assert {layout.devices for layout in found} == {32}
    assert max(layout.tp for layout in found) == 4  # of 28 heads
    assert len(found) == len(set(found))


def test_the_quickest_arrangement_that_fits_is_chosen() -> None:
    shape, pool = find_shape("Qwen2.5-32B"), open_cluster("16xH100").pools[0]
    layout, seconds = best_layout(shape, pool, 16, BATCHES)
    fitting = [
        AnalyticTrainingTimes(setup, pool).step_s(BATCHES.micro_batches(other.dp))
        for other in layouts(shape, pool, 16)
        if trainer_memory(setup := TrainingSetup(shape=shape, layout=other), BATCHES.largest).fits(pool.device)
    ]
    assert seconds == min(fitting)
    assert trainer_memory(TrainingSetup(shape=shape, layout=layout), BATCHES.largest).fits(pool.device)


def test_a_model_that_trains_nowhere_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(PlanError, match=r"trainer of Qwen2\.5-72B lacks [\d.]+ GiB on each of 8 H100"):
        best_layout(find_shape("Qwen2.5-72B"), ENGINES.pool, 8, BATCHES)


def test_no_micro_batch_is_larger_than_a_step() -> None:
    small = replace(BATCHES, tokens=13_000.5)
    assert small.largest.tokens == 13_001
    assert replace(small, longest=14_000).largest.tokens == 14_000
    assert BATCHES.largest.tokens == BATCHES.micro_batch_tokens


def test_an_engine_has_as_few_devices_as_hold_it() -> None:
    pool = open_cluster("8xH100").pools[0]
    degrees = [
        least_tp(replace(ENGINES, pool=pool), find_shape(name), tokens=32_768)
        for name in ("Qwen2.5-7B", "Qwen2.5-32B", "Qwen2.5-72B")
    ]
    assert degrees == [1, 2, 4]
    assert engine_tokens(find_shape("Qwen2.5-72B"), pool, tp=1, step_tokens=8192, slots=256) < 0


def test_an_engine_that_no_node_holds_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(PlanError, match=r"lacks [\d.]+ GiB on each of 8 A40"):
        least_tp(replace(ENGINES, pool=open_cluster("8xA40").pools[0]), find_shape("DeepSeek-V3"), tokens=1)


def test_a_shared_prompt_counts_once_in_a_step() -> None:
    batches = mean_batches([(10, [5, 15]), (20, [10, 30])], groups_per_step=4, micro_batch_tokens=64)
    assert batches.tokens == 4 * (30 + 60) / 2
    assert batches.longest == 50
    pairs = 10**2 + 5 * 25 + 15 * 35 + 20**2 + 10 * 50 + 30 * 70
    assert batches.mean_length == pairs / 90
