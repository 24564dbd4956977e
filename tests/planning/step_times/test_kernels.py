"""Claims on step times from measured kernels."""

import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import PlanError
from tailrace.planning.hardware.clusters import open_cluster
from tailrace.planning.model_shape.catalogue import find_shape
from tailrace.planning.model_shape.hugging_face import shape_of
from tailrace.planning.step_times.kernels import KernelStepTimes, config_of
from tailrace.planning.step_times.operators import prefill
from tailrace.planning.step_times.rates import HOSTS
from tailrace.planning.step_times.sources import source_of

SHAPE = find_shape("Qwen3-8B")


@pytest.fixture(scope="module")
def kernels() -> KernelStepTimes:
    pytest.importorskip("aiconfigurator_core", reason="the package aiconfigurator-core is not installed")
    return KernelStepTimes(SHAPE, "H100")


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Qwen3-8B", "Qwen3-30B-A3B", "Llama-3.1-70B"])
def test_sizes_are_written_as_they_are_read(name: str) -> None:
    shape = find_shape(name)
    config = config_of(shape) | {"model_type": "qwen3" if shape.qk_norm else "llama"}
    assert shape_of(config, name=name, source="test") == replace(shape, qkv_bias=False, tied=False)


def test_steps_are_the_sums_of_the_package(kernels: KernelStepTimes) -> None:
    handle = kernels._compiled(2)
    for size, context in [(1, 100), (8, 1500), (48, 3000), (256, 700)]:
        expected = handle.predict_decode_latency(size, context, 2) / 1e3
        assert kernels.step_s(2, size, size * context, 1) == pytest.approx(expected, rel=0.05)
    for sequences, length in [(1, 300), (1, 6000), (4, 1000)]:
        expected = handle.predict_prefill_latency(sequences, length) / 1e3
        assert kernels.prefill_s(2, sequences, length) == pytest.approx(expected, rel=0.1)


@given(st.integers(1, 300), st.integers(0, 10**6), st.integers(1, 20_000))
def test_more_context_and_more_prompts_never_take_less_time(
    kernels: KernelStepTimes, batch: int, context: int, chunk: int
) -> None:
    step = kernels.step_s(1, batch, context, 1)
    assert 0 < step <= kernels.step_s(1, batch, context + 5000, 1) * (1 + 1e-9)
    mixed = kernels.mixed_s(1, batch, context, prefill(1, chunk))
    assert step <= mixed <= step + kernels.prefill_s(1, 1, chunk)


def test_a_token_beyond_a_tile_of_products_costs_what_the_package_measured(kernels: KernelStepTimes) -> None:
    handle = kernels._compiled(1)
    for tokens in (512, 513, 1024, 1025):
        expected = handle.predict_prefill_latency(1, tokens) / 1e3
        assert kernels.prefill_s(1, 1, tokens) == pytest.approx(expected, rel=0.03)


def test_decoding_beside_prompts_costs_more_where_attention_does_not_pack_heads(kernels: KernelStepTimes) -> None:
    chunk = prefill(1, 256)
    for engine, least in ((kernels, 1.0), (KernelStepTimes(SHAPE, "RTX-PRO-6000"), 1.2)):
        alone = engine.step_s(1, 64, 65_536, 1) - engine.step_s(1, 64, 64, 1)
        beside = engine.mixed_s(1, 64, 65_536, chunk) - engine.mixed_s(1, 64, 64, chunk)
        assert beside >= least * alone * (1 - 1e-9)


def test_beyond_the_grid_time_goes_on(kernels: KernelStepTimes) -> None:
    assert kernels.step_s(1, 2048, 2048 * 1024, 1) > kernels.step_s(1, 1024, 1024 * 1024, 1)
    assert kernels.prefill_s(1, 1, 300_000) > 2 * kernels.prefill_s(1, 1, 150_000)


def test_the_host_is_added_once_a_step(kernels: KernelStepTimes) -> None:
    with_host = KernelStepTimes(SHAPE, "H100", host=HOSTS["vllm"])
    added = with_host.step_s(1, 10, 1000, 1) - kernels.step_s(1, 10, 1000, 1)
    assert added == pytest.approx(HOSTS["vllm"].seconds(10))


def test_degrees_that_do_not_divide_the_heads_are_refused(kernels: KernelStepTimes) -> None:
    with pytest.raises(PlanError, match="32 heads, which TP 3 does not divide"):
        kernels.step_s(3, 1, 1, 1)


def test_what_the_tables_lack_is_said_in_one_line(kernels: KernelStepTimes) -> None:
    old = KernelStepTimes(SHAPE, "A100", dtype="float8")
    with pytest.raises(PlanError, match="kernel tables of a100_sxm, vllm do not have Qwen3-8B with TP 1 in float8"):
        old.step_s(1, 1, 1, 1)


@pytest.mark.parametrize(
    ("kind", "model", "message"),
    [
        ("H20", "Qwen3-8B", "no kernel tables of H20; there are of H100, H200"),
        ("H100", "DeepSeek-V3", "DeepSeek-V3 has latent attention"),
    ],
)
def test_what_is_not_covered_is_refused(kind: str, model: str, message: str, kernels: KernelStepTimes) -> None:
    with pytest.raises(PlanError, match=message):
        KernelStepTimes(find_shape(model), kind)


def test_without_the_package_one_line_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk", None)
    with pytest.raises(PlanError, match=r'pip install "tailrace\[plan\]"'):
        KernelStepTimes(SHAPE, "H100")


def test_a_model_that_the_tables_lack_has_analytic_times_where_that_is_asked() -> None:
    pytest.importorskip("aiconfigurator_core", reason="the package aiconfigurator-core is not installed")
    known = find_shape("Qwen2.5-7B")
    odd, pool = replace(known, heads=8, kv_heads=8, head_dim=24), open_cluster("8xH100").pools[0]
    assert [source_of(shape, pool, [1]).basis.kind for shape in (known, odd)] == ["kernels", "analytic"]


def test_devices_with_other_rates_than_the_measured_ones_are_analytic(kernels: KernelStepTimes) -> None:
    (pool,) = open_cluster("8xH100").pools
    cheaper = replace(pool, device=pool.device.model_copy(update={"usd_per_hour": 1.0}))
    slower = replace(pool, device=pool.device.model_copy(update={"memory_gb_s": 2000.0}))
    assert [source_of(SHAPE, one, [1]).basis.kind for one in (cheaper, slower)] == ["kernels", "analytic"]
