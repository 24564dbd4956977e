"""What one engine tells of itself reaches the decision."""

import math

import pytest

from tailrace.config.engine import AdaptiveTPConfig
from tailrace.planning.remaining import Unfinished
from tailrace.planning.tp_stage import StagedTP
from tests.planning.tp_profiles import flat, made_profile

STEP_S = 0.01
SEQUENCE_S = 0.001


def stage_of(*, cache_tokens: float = math.inf, estimate: str = "survival") -> StagedTP:
    return StagedTP(
        AdaptiveTPConfig.model_validate({"estimate": estimate}),
        made_profile(flat({1: STEP_S, 2: STEP_S}, SEQUENCE_S)),
        max_batch_size=16,
        cache_tokens=lambda tp: cache_tokens,
        kv_bytes_per_token=1,
    )


def remaining_s(stage: StagedTP, *sequences: Unfinished) -> float:
    """The seconds that these have left, on one of two replicas."""
    decision = stage.decide(1, (sequences, ()), (), frozenset({1}))
    return next(candidate.remaining_s for candidate in decision.candidates if candidate.tp == 1)


def test_lengths_of_evaluations_say_nothing_about_those_that_are_trained_on() -> None:
    stage = stage_of()
    for _ in range(8):
        stage.ended(10, group=3)
        stage.ended(200, group=-2)
    trained, evaluated = (stage.unfinished(16, 0, 300, None, group=group, block=4) for group in (5, -7))
    assert remaining_s(stage, trained) == pytest.approx(10 * (STEP_S + SEQUENCE_S))
    assert remaining_s(stage, evaluated) == pytest.approx(200 * (STEP_S + SEQUENCE_S))


def test_responses_wait_where_the_engine_has_cache_for_half_of_them() -> None:
    limits = {"roomy": math.inf, "tight": 2 * (16 + 40)}
    seconds = {}
    for name, cache_tokens in limits.items():
        stage = stage_of(cache_tokens=cache_tokens, estimate="bound")
        sequences = [stage.unfinished(16, 0, 40, None, group=-1, block=4) for _ in range(4)]
        seconds[name] = remaining_s(stage, *sequences)
    assert seconds["roomy"] == pytest.approx(40 * (STEP_S + 4 * SEQUENCE_S))
    assert seconds["tight"] > 1.25 * seconds["roomy"]
