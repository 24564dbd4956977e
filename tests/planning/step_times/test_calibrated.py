"""Claims on analytic step times that are scaled by measured ones."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import PlanError
from tailrace.planning.hardware.clusters import open_cluster
from tailrace.planning.model_shape.catalogue import find_shape
from tailrace.planning.step_times.calibrated import CalibratedStepTimes
from tailrace.planning.step_times.generation import AnalyticStepTimes
from tailrace.planning.step_times.operators import prefill
from tailrace.planning.tp_profile import DecodePoint, PrefillPoint, TPProfile
from tests.planning.tp_profiles import StepFormula, made_profile

POOL = open_cluster("8xH100").pools[0]
ANALYTIC = AnalyticStepTimes(find_shape("Qwen3-8B"), POOL)
OTHER = AnalyticStepTimes(find_shape("Qwen3-14B"), POOL)
RATIO = st.floats(0.3, 3.0)
BATCH = st.integers(1, 300)
CONTEXT = st.integers(0, 500_000)


def measured(step: StepFormula, prefill_ratio: float = 1.0) -> TPProfile:
    prefills = tuple(
        PrefillPoint(tp=tp, batch_size=1, length=n, seconds=prefill_ratio * ANALYTIC.prefill_s(tp, 1, n))
        for tp in (1, 2)
        for n in (64, 4096)
    )
    return made_profile(step, prefill=prefills)


def scaled(ratio: float) -> TPProfile:
    return measured(lambda tp, size, tokens, _: ratio * ANALYTIC.step_s(tp, size, tokens, 1), ratio)


@given(RATIO, BATCH, CONTEXT, st.sampled_from([1, 2]))
def test_a_constant_ratio_is_carried_to_all_steps(ratio: float, batch: int, context: int, tp: int) -> None:
    found = CalibratedStepTimes.fitted(ANALYTIC, scaled(ratio))
    chunk = prefill(1, 700)
    assert found.step_s(tp, batch, context, 1) == pytest.approx(ratio * ANALYTIC.step_s(tp, batch, context, 1))
    assert found.prefill_s(tp, 2, 900) == pytest.approx(ratio * ANALYTIC.prefill_s(tp, 2, 900))
    assert found.mixed_s(tp, batch, context, chunk) == pytest.approx(
        ratio * ANALYTIC.mixed_s(tp, batch, context, chunk)
    )
    assert found.basis.kind == "calibrated"
    assert found.basis.error == pytest.approx(0, abs=1e-6)


@given(st.lists(RATIO, min_size=9, max_size=9), BATCH, CONTEXT)
def test_steps_are_between_the_least_and_the_greatest_ratio_times_analytic(
    ratios: list[float], batch: int, context: int
) -> None:
    sizes, lengths = (1, 4, 16), (16, 64, 256)  # those of `made_profile`
    found = CalibratedStepTimes.fitted(
        ANALYTIC,
        measured(
            lambda tp, size, tokens, _: (
                ratios[3 * sizes.index(size) + lengths.index(tokens // size)] * ANALYTIC.step_s(tp, size, tokens, 1)
            )
        ),
    )
    step, analytic = found.step_s(1, batch, context, 1), ANALYTIC.step_s(1, batch, context, 1)
    assert min(ratios) * analytic <= step * (1 + 1e-9)
    assert step <= max(ratios) * analytic * (1 + 1e-9)
    assert found.step_s(1, batch, context + 1000, 1) >= step  # monotone in context, whatever was measured


def test_parts_of_a_step_are_told_apart() -> None:
    """Where reading the cache alone takes twice as long, the steps are that much longer everywhere."""

    def slow_cache(tp: int, size: float, tokens: float) -> float:
        without = ANALYTIC.step_s(tp, size, 0, 1)
        return without + 2 * (ANALYTIC.step_s(tp, size, tokens, 1) - without)

    points = [
        DecodePoint(tp=1, replicas=1, batch_size=b, context_tokens=b * n, seconds=slow_cache(1, b, b * n))
        for b in (1, 16, 128)
        for n in (16, 4096, 131_072)
    ]
    found = CalibratedStepTimes.fitted(
        ANALYTIC, made_profile(lambda *_: 1.0, ranks=1, degrees=(1,), decode=tuple(points))
    )
    assert found.factors[1].context == pytest.approx(2, rel=0.01)
    assert found.step_s(1, 256, 2**20, 1) == pytest.approx(slow_cache(1, 256, 2**20), rel=0.02)


def test_another_model_on_the_same_hardware_has_the_same_factors() -> None:
    found = CalibratedStepTimes.fitted(ANALYTIC, scaled(1.5)).of(OTHER)
    assert found.step_s(1, 8, 4096, 1) == pytest.approx(1.5 * OTHER.step_s(1, 8, 4096, 1))


def test_a_degree_that_was_not_measured_has_the_factors_of_the_nearest() -> None:
    found = CalibratedStepTimes.fitted(
        ANALYTIC, measured(lambda tp, size, tokens, _: tp * ANALYTIC.step_s(tp, size, tokens, 1))
    )
    assert found.step_s(8, 4, 100, 1) == pytest.approx(2 * ANALYTIC.step_s(8, 4, 100, 1))


def test_the_interval_is_that_of_nine_of_ten_residuals() -> None:
    noisy = measured(lambda tp, size, tokens, _: ANALYTIC.step_s(tp, size, tokens, 1) * (1.2 if size == 4 else 1))
    error = CalibratedStepTimes.fitted(ANALYTIC, noisy).basis.error
    assert 0.1 < error < 0.21
    low, high = CalibratedStepTimes.fitted(ANALYTIC, noisy).basis.interval(1.0)
    assert low * high == pytest.approx(1)
    assert math.isclose(high, 1 + error)


def test_nothing_measured_is_refused() -> None:
    class Nothing:
        decode: tuple[DecodePoint, ...] = ()
        prefill: tuple[PrefillPoint, ...] = ()

    with pytest.raises(PlanError, match="no measured decode steps"):
        CalibratedStepTimes.fitted(ANALYTIC, Nothing())
