"""Claims on step times from an engine's own profile."""

import pytest

from tailrace.planning.step_times.operators import prefill
from tailrace.planning.step_times.profiled import DRIFT, ProfiledStepTimes
from tests.planning.tp_profiles import made_profile

LINEAR = ProfiledStepTimes(made_profile(lambda tp, size, tokens, _: 0.01 + 1e-3 * size + 1e-6 * tokens))


def test_a_pass_over_prompts_adds_all_but_what_steps_have_in_common() -> None:
    step, alone = LINEAR.step_s(1, 4, 256, 1), LINEAR.prefill_s(1, 1, 100)
    assert LINEAR.mixed_s(1, 4, 256, prefill(1, 100)) == pytest.approx(step + alone - 0.011)
    assert LINEAR.mixed_s(1, 4, 256, prefill(1, 0)) == step
    assert LINEAR.mixed_s(1, 0, 0, prefill(1, 100)) == alone


def test_the_interval_counts_what_each_point_differs_from_its_neighbours() -> None:
    assert LINEAR.basis.error == pytest.approx(DRIFT)
    noisy = ProfiledStepTimes(made_profile(lambda tp, size, tokens, _: 0.01 * (1.25 if tokens // size == 64 else 1)))
    assert noisy.basis.error == pytest.approx(DRIFT + 0.25)
    assert noisy.basis.kind == "profiled"
