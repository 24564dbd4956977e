"""Claims on step times that are added up over operators."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.planning.hardware.clusters import open_cluster
from tailrace.planning.model_shape.catalogue import find_shape
from tailrace.planning.step_times.base import Load
from tailrace.planning.step_times.generation import AnalyticStepTimes
from tailrace.planning.step_times.operators import NOTHING, Sharers, decode, joined, operators, prefill
from tailrace.planning.step_times.rates import Host

MEASURED = json.loads((Path(__file__).parents[3] / "benchmarks" / "h100_steps.json").read_text())


def times(model: str, kind: str = "H100") -> AnalyticStepTimes:
    return AnalyticStepTimes(find_shape(model), open_cluster(f"8x{kind}").pools[0])


@pytest.mark.parametrize(
    ("key", "model"),
    [("8b", "Qwen3-8B"), ("14b", "Qwen3-14B"), ("32b", "Qwen3-32B"), ("235b", "Qwen3-235B-A22B")],
)
def test_decode_steps_are_near_those_added_up_from_measured_kernels(key: str, model: str) -> None:
    """Without any figure of these models, within a fifth, and within a tenth in the median."""
    tp, analytic = MEASURED[key]["tp"], times(model)
    ratios = sorted(analytic.step_s(tp, size, tokens, 1) / s for size, tokens, s in MEASURED[key]["decode"])
    assert ratios[0] > 0.75
    assert ratios[-1] < 1.25
    assert ratios[len(ratios) // 2] == pytest.approx(1, abs=0.1)


def test_products_of_a_pass_have_two_operations_a_parameter_and_token() -> None:
    shape = find_shape("Qwen3-8B")
    work = prefill(4, 256, logits=4 * 256)
    products = sum(o.flops * o.count for o in operators(shape, work) if o.kind == "product")
    norms = shape.layers * 2 * (shape.hidden + shape.head_dim) + shape.hidden
    weights = shape.parameters - shape.vocab * shape.hidden - norms  # nor is the embedding a product
    assert products == 2 * weights * 4 * 256


@given(st.integers(1, 256), st.integers(1, 2**17), st.integers(1, 4096), st.sampled_from([1, 2, 4, 8]))
def test_more_work_never_takes_less_time(batch: int, context: int, chunk: int, tp: int) -> None:
    engine = times("Qwen3-8B")
    step = engine.step_s(tp, batch, context, 1)
    assert engine.step_s(tp, batch + 1, context, 1) >= step
    assert engine.step_s(tp, batch, context + 1, 1) >= step
    assert engine.mixed_s(tp, batch, context, prefill(1, chunk)) >= step


@given(st.integers(1, 256), st.integers(1, 2**17), st.sampled_from([1, 2, 4, 8]))
def test_a_device_with_more_bandwidth_is_never_slower(batch: int, context: int, tp: int) -> None:
    slower, faster = times("Qwen3-8B", "H100"), times("Qwen3-8B", "H200")  # these two differ in memory alone
    assert faster.step_s(tp, batch, context, 1) <= slower.step_s(tp, batch, context, 1)


def test_a_joined_pass_reads_the_weights_once() -> None:
    engine = times("Qwen3-8B")
    parts = decode(8, 8 * 512), prefill(1, 512)
    together = engine.pass_s(1, joined(*parts))
    assert together < sum(engine.pass_s(1, part) for part in parts) - 4e-3


def test_experts_that_no_token_is_sent_to_are_not_read() -> None:
    engine, all_of_them = times("Qwen3-30B-A3B"), times("Qwen3-32B")
    assert engine.step_s(1, 1, 512, 1) < all_of_them.step_s(1, 1, 512, 1) / 4


def test_decoding_beside_prompts_costs_more_where_attention_does_not_pack_heads() -> None:
    """What the cache adds to a step, by itself and beside a prompt: the same on H100, more on RTX 4090."""
    chunk = prefill(1, 256)
    for kind, least in (("H100", 0.0), ("RTX-4090", 1.5)):
        engine = times("Qwen3-8B", kind)
        alone = engine.step_s(1, 64, 65_536, 1) - engine.step_s(1, 64, 0, 1)
        beside = engine.mixed_s(1, 64, 65_536, chunk) - engine.mixed_s(1, 64, 0, chunk)
        assert beside > least * alone
        assert kind != "H100" or beside == pytest.approx(alone, rel=0.1)


def sharers(replicas: int) -> AnalyticStepTimes:
    return AnalyticStepTimes(find_shape("Qwen3-30B-A3B"), open_cluster("8xH100").pools[0], sharers=replicas)


def test_replicas_that_share_experts_read_a_part_of_them_each() -> None:
    assert sharers(2).step_s(1, 64, 65_536, 1) < 0.75 * sharers(1).step_s(1, 64, 65_536, 1)


def test_a_dispatch_moves_the_vectors_of_all_tokens_and_none_is_alone() -> None:
    shape = find_shape("Qwen3-30B-A3B")
    for replicas, expected in ((1, []), (2, [2 * 8 * shape.hidden * 2])):
        each = operators(shape, decode(8, 100), sharers=Sharers(replicas=replicas, tokens=replicas * 8))
        assert [o.exchanged_bytes for o in each if o.kind == "dispatch"] == expected


def test_replicas_in_lockstep_with_as_much_each_take_as_long_as_one() -> None:
    engine, chunk = sharers(2), prefill(1, 256)
    assert engine.lockstep_s(1, [Load(8, 4096, chunk)] * 2) == engine.mixed_s(1, 8, 4096, chunk)
    assert engine.lockstep_s(1, [Load()] * 2) == 0


@given(st.integers(0, 128), st.integers(0, 128), st.integers(0, 1024))
def test_replicas_in_lockstep_wait_for_the_slowest(one: int, other: int, chunk: int) -> None:
    engine = sharers(2)
    loads = [Load(one, 512 * one, prefill(1, chunk) if chunk else NOTHING), Load(other, 512 * other)]
    both = engine.lockstep_s(1, loads)
    assert both == engine.lockstep_s(1, loads[::-1])
    assert both >= max(engine.lockstep_s(1, [load, Load()]) for load in loads)


def test_weights_in_8_bits_leave_vectors_cache_and_head_in_16() -> None:
    shape, work = find_shape("Qwen3-8B"), decode(8, 8 * 512)
    wide, narrow = ({o.name: o for o in operators(shape, work, tp=2, element_bytes=size)} for size in (2.0, 1.0))
    for name in ("attention", "norm", "all-reduce", "head"):
        assert narrow[name] == wide[name]
    assert narrow["down"].read_bytes == pytest.approx(wide["down"].read_bytes / 2, rel=0.01)
    cached = {o.name: o for o in operators(shape, work, tp=2, element_bytes=1.0, cache_bytes=1.0)}
    assert cached["attention"].read_bytes == wide["attention"].read_bytes / 2


def test_a_host_that_prepares_steps_ahead_counts_where_it_takes_longer_than_the_device() -> None:
    serial, ahead = Host(step_s=1e-3, sequence_s=1e-4), Host(step_s=1e-3, sequence_s=1e-4, overlaps=True)
    assert (serial.step(5e-3, 10), ahead.step(5e-3, 10)) == pytest.approx((7e-3, 5e-3))
    assert (serial.step(5e-3, 90), ahead.step(5e-3, 90)) == pytest.approx((15e-3, 10e-3))
