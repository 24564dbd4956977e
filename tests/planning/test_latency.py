"""Steps predicted from a profile, and their correction."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.planning.latency import CorrectedPredictor, DecodedStep, LatencyPredictor, alike, prefill_errors
from tailrace.planning.tp_profile import DecodePoint, PrefillPoint, TPProfile, UnevenPoint, prefill_grid
from tests.planning.tp_profiles import flat, made_profile


def bent(tp: int, size: int, tokens: int, replicas: int) -> float:
    """Seconds of a step, linear neither in B nor in T, and more with more replicas."""
    return (0.01 + 1e-3 * math.sqrt(size) + 1e-4 * math.sqrt(tokens)) / tp * (1 + 0.5 * (replicas - 1))


def linear(tp: int, size: int, tokens: int, replicas: int) -> float:
    return 0.01 + 2e-3 * size + 1e-5 * tokens + 4e-3 * replicas


PROFILE = made_profile(bent)
PREDICTOR = LatencyPredictor(PROFILE)
LINEAR = LatencyPredictor(made_profile(linear, ranks=4, degrees=(1, 2, 4)))


@pytest.mark.parametrize("point", PROFILE.decode, ids=lambda p: f"{p.tp}-{p.replicas}-{p.batch_size}")
def test_a_profiled_step_is_predicted_exactly(point: DecodePoint) -> None:
    assert PREDICTOR.step_s(point.tp, point.batch_size, point.context_tokens, point.replicas) == point.seconds


@pytest.mark.parametrize("point", PROFILE.prefill, ids=lambda p: f"{p.tp}-{p.batch_size}-{p.length}")
def test_a_profiled_prefill_is_predicted_exactly(point: PrefillPoint) -> None:
    assert PREDICTOR.prefill_s(point.tp, point.batch_size, point.length) == pytest.approx(point.seconds)


@given(st.sampled_from([1, 2, 4]), st.integers(1, 64), st.integers(1, 100_000), st.integers(1, 4))
def test_what_is_linear_is_predicted_exactly_inside_and_outside_of_the_grid(
    tp: int, size: int, tokens: int, replicas: int
) -> None:
    active = min(replicas, 4 // tp)
    assert LINEAR.step_s(tp, size, tokens, active) == pytest.approx(linear(tp, size, tokens, active))


@given(st.sampled_from([1, 2]), st.integers(1, 40), st.tuples(st.integers(0, 20_000), st.integers(0, 20_000)))
def test_more_context_never_takes_less_time(tp: int, size: int, tokens: tuple[int, int]) -> None:
    fewer, more = (PREDICTOR.step_s(tp, size, count, 1) for count in sorted(tokens))
    assert 0 <= fewer <= more + 1e-12


def test_between_two_batch_sizes_both_curves_are_asked_at_the_same_context_tokens() -> None:
    # B = 2 lies a third of the way from 1 to 4; T = 64 is a point of both
    low, high = bent(1, 1, 64, 1), bent(1, 4, 64, 1)
    assert PREDICTOR.step_s(1, 2, 64, 1) == pytest.approx(low + (high - low) / 3)


def test_a_point_that_noise_put_too_low_turns_no_extrapolation_downwards() -> None:
    noisy = {16: 0.02, 64: 0.03, 256: 0.025}
    profile = made_profile(lambda tp, size, tokens, replicas: noisy[tokens // size])
    predictor = LatencyPredictor(profile)
    assert predictor.step_s(1, 1, 10_000, 1) == 0.025
    assert predictor.step_s(1, 100, 1000, 1) >= predictor.step_s(1, 16, 1000, 1)


def test_no_extrapolation_falls_below_zero() -> None:
    steep = made_profile(lambda tp, size, tokens, replicas: 1e-4 * tokens - 1e-3 if tokens > 16 else 1e-5)
    assert LatencyPredictor(steep).step_s(1, 1, 0, 1) == 0.0


def test_replicas_that_were_not_profiled_lie_between_those_that_were() -> None:
    profile = made_profile(lambda tp, size, tokens, replicas: 0.01 * replicas, ranks=4, degrees=(1, 2, 4))
    predictor = LatencyPredictor(profile)
    assert [predictor.step_s(1, 1, 16, replicas) for replicas in (1, 2, 3, 4)] == pytest.approx(
        [0.01, 0.02, 0.03, 0.04]
    )
    assert predictor.step_s(1, 1, 16, 9) == 0.04


def test_a_degree_with_one_point_is_the_same_everywhere() -> None:
    profile = made_profile(
        bent, decode=tuple(p for p in PROFILE.decode if (p.replicas, p.batch_size, p.context_tokens) == (1, 1, 16))
    )
    predictor = LatencyPredictor(profile)
    assert predictor.step_s(2, 50, 9999, 1) == predictor.step_s(2, 1, 16, 1) == bent(2, 1, 16, 1)


def test_prefill_is_in_proportion_to_tokens_outside_of_its_points() -> None:
    # made_profile: 1 ms a token
    assert PREDICTOR.prefill_s(1, 32, 128) == pytest.approx(32 * 0.128)
    assert PREDICTOR.prefill_s(1, 2, 8) == pytest.approx(0.016)
    assert PREDICTOR.prefill_s(1, 1, 1000) == pytest.approx(1.0)


UNEVEN = tuple(
    UnevenPoint(tp=1, batch_size=size, others=others, seconds=ratio * 0.1, even_s=0.1)
    for size, others, ratio in ((1, 16, 1.2), (4, 16, 1.1), (4, 1, 0.9), (16, 1, 0.8))
)
"""Steps of two replicas of TP 1: the larger the batch of the other, the longer they take."""


@pytest.mark.parametrize(
    ("size", "others", "ratio"),
    [
        (4, 4, 1.0),
        (1, 16, 1.2),
        (4, 16, 1.1),
        (4, 10, 1.05),
        (16, 1, 0.8),
        (4, 1, 0.9),
        (4, 2.5, 0.95),
        (10, 1, 0.85),
        (1, 1, 1.0),
        (40, 1, 0.8),
    ],
)
def test_a_step_beside_another_batch_takes_as_much_more_or_less_as_was_measured(
    size: int, others: float, ratio: float
) -> None:
    predictor = LatencyPredictor(made_profile(bent, uneven=UNEVEN))
    even = predictor.step_s(1, size, 600, 2)
    assert predictor.step_s(1, size, 600, 2, others) == pytest.approx(ratio * even)
    assert predictor.step_s(1, size, 600, 1, others) == predictor.step_s(1, size, 600, 1), "there is no other"
    assert predictor.step_s(2, size, 600, 2, others) == predictor.step_s(2, size, 600, 2), "it was not measured so"


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=9))
def test_many_steps_beside_other_batches_take_what_each_takes(steps: list[tuple[int, int]]) -> None:
    predictor = LatencyPredictor(made_profile(bent, uneven=UNEVEN))
    sizes, others = np.array(steps, np.float64).T
    twos = np.full(len(steps), 2.0)
    found = predictor.steps_s(1, sizes, 50 * sizes, twos, others)
    assert found.tolist() == pytest.approx([predictor.step_s(1, own, 50 * own, 2, other) for own, other in steps])


def attending(tp: int, size: int, length: int) -> float:
    """Seconds of a prefill with a constant, a part for each token and one for each pair of tokens."""
    return (0.01 + 3e-4 * size * length + 4e-8 * size * length * length) / tp


def prefilled(longest: int, noise: float = 0.0) -> TPProfile:
    """A profile of such prefills, whose every second point takes longer by the part `noise`."""
    points = tuple(
        PrefillPoint(
            tp=tp, batch_size=size, length=length, seconds=attending(tp, size, length) * (1 + noise * (index % 2))
        )
        for tp in (1, 2)
        for index, (size, length) in enumerate(prefill_grid(64, longest))
    )
    return made_profile(bent, prefill=points)


@given(st.sampled_from([1, 2]), st.integers(16, 16_384))
def test_a_prefill_grows_with_the_square_of_its_length_also_beyond_the_longest_that_was_measured(
    tp: int, length: int
) -> None:
    predictor = LatencyPredictor(prefilled(4096))
    assert predictor.prefill_s(tp, 1, length) == pytest.approx(attending(tp, 1, length), rel=0.001)


@given(st.integers(2, 64), st.integers(64, 4096))
def test_the_attention_of_every_sequence_of_a_batch_counts(size: int, length: int) -> None:
    assert LatencyPredictor(prefilled(4096)).prefill_s(1, size, length) == pytest.approx(
        attending(1, size, length), rel=0.05
    )


@pytest.mark.parametrize("point", prefilled(4096, noise=0.1).prefill, ids=lambda p: f"{p.tp}-{p.batch_size}-{p.length}")
def test_a_profiled_prefill_is_predicted_exactly_whatever_the_fit(point: PrefillPoint) -> None:
    predictor = LatencyPredictor(prefilled(4096, noise=0.1))
    assert predictor.prefill_s(point.tp, point.batch_size, point.length) == pytest.approx(point.seconds)


def test_the_error_of_a_prefill_is_that_of_a_prediction_from_the_others() -> None:
    assert prefill_errors(prefilled(4096)) == pytest.approx({1: 0.0, 2: 0.0}, abs=1e-6)
    assert 0.05 < prefill_errors(prefilled(4096, noise=0.1))[1] < 0.15
    assert prefill_errors(PROFILE) == {}, "of two lengths there is none in between"


def test_a_degree_that_was_not_profiled_is_an_error() -> None:
    with pytest.raises(KeyError):
        PREDICTOR.step_s(8, 1, 16, 1)


@given(st.lists(st.integers(0, 500), max_size=20))
def test_prompts_are_prefilled_as_equal_ones_with_as_many_tokens_and_pairs_of_tokens(lengths: list[int]) -> None:
    number, length = alike(lengths)
    assert number * length == pytest.approx(sum(lengths))
    assert number * length * length == pytest.approx(sum(one * one for one in lengths))


def test_equal_prompts_are_as_they_are() -> None:
    assert alike([300] * 4) == pytest.approx((4, 300))
    assert alike([]) == (0.0, 0.0)


def corrected() -> CorrectedPredictor:
    return CorrectedPredictor(LatencyPredictor(made_profile(flat({1: 0.01, 2: 0.006}, a_sequence=0.0))))


def observe(predictor: CorrectedPredictor, tp: int, seconds: float, times: int) -> None:
    for _ in range(times):
        predictor.observe(DecodedStep(tp, 1, 16, 1, seconds))


def test_the_correction_moves_slowly_to_what_is_measured_and_leaves_the_base_alone() -> None:
    predictor = corrected()
    observe(predictor, 1, 0.02, 1)
    assert 1.0 < predictor.ratio(1, 1) < 1.1
    observe(predictor, 1, 0.02, 200)
    assert predictor.step_s(1, 1, 16, 1) == pytest.approx(0.02, rel=0.01)
    assert predictor.base.step_s(1, 1, 16, 1) == 0.01


def test_a_degree_that_does_not_run_drifts_along_with_the_one_that_does() -> None:
    predictor = corrected()
    observe(predictor, 1, 0.02, 200)
    assert 1.6 < predictor.ratio(2, 1) < 2.0


def test_degrees_that_are_wrong_in_different_ways_are_told_apart() -> None:
    predictor = corrected()
    for _ in range(50):
        observe(predictor, 1, 0.02, 10)
        observe(predictor, 2, 0.006, 10)
    assert predictor.ratio(1, 1) == pytest.approx(2.0, rel=0.25)
    assert predictor.ratio(2, 1) == pytest.approx(1.0, rel=0.25)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9000), st.integers(1, 4)), min_size=1, max_size=9),
    st.sampled_from([1, 2]),
)
def test_many_steps_at_once_take_what_each_takes(steps: list[tuple[int, int, int]], tp: int) -> None:
    def step_s(degree: int, size: int, tokens: int, replicas: int) -> float:
        return 0.01 / degree + 1e-3 * math.sqrt(size) + 1e-5 * math.pow(tokens, 0.8) * replicas

    predictor = CorrectedPredictor(LatencyPredictor(made_profile(step_s, ranks=4, degrees=(1, 2))))
    predictor.observe(DecodedStep(1, 2, 60, 3, 0.1))
    sizes, tokens, replicas = np.array(steps, np.float64).T
    expected = [predictor.step_s(tp, size, held, beside) for size, held, beside in steps]
    assert predictor.steps_s(tp, sizes, tokens, replicas).tolist() == pytest.approx(expected)


@given(st.lists(st.tuples(st.sampled_from([1, 2]), st.floats(0, 1e9)), max_size=50))
def test_the_correction_stays_within_a_quarter_and_four(measured: list[tuple[int, float]]) -> None:
    predictor = corrected()
    for tp, seconds in measured:
        observe(predictor, tp, seconds, 5)
    assert all(0.249 <= predictor.ratio(tp, 1) <= 4.001 for tp in (1, 2))
