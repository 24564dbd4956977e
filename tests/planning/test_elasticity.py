"""An elastic pool grows and shrinks to where generation and training balance, and stays there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.planning.elasticity import Elasticity, ScaleDecision, ScaleLimits


def decide(
    elasticity: Elasticity, engines: int, *, work_s: float, training_s: float, tail_s: float = 0.0
) -> ScaleDecision:
    """A step whose generation has `work_s` to divide among the engines, and a tail that no engine shortens."""

    def generation_s(count: int) -> float:
        return tail_s + work_s / count

    return elasticity.decide(
        engines=engines,
        generation_s=generation_s(engines),
        training_s=training_s,
        saved_s=generation_s(engines) - generation_s(engines + 1),
        lost_s=generation_s(engines - 1) - generation_s(engines) if engines > 1 else float("inf"),
    )


def after(elasticity: Elasticity, engines: int, steps: int, **times: float) -> list[int]:
    """The engines after each step."""
    counts = []
    for _ in range(steps):
        action = decide(elasticity, engines, **times).action
        engines += {"add": 1, "release": -1, "hold": 0}[action]
        counts.append(engines)
    return counts


def test_an_engine_is_added_when_generation_is_longer_by_what_one_more_saves() -> None:
    limits = ScaleLimits(least=1, most=8, patience=1, cool_down=0)
    # 120 / 2 - 40 = 20 and 120 / 2 - 120 / 3 = 20: δ = δ'
    assert decide(Elasticity(limits), 2, work_s=120, training_s=40).action == "add"
    assert decide(Elasticity(limits), 2, work_s=120, training_s=40.1).action == "hold"
    assert decide(Elasticity(limits), 2, work_s=0, tail_s=100, training_s=40).action == "hold", "it would save nothing"


def test_one_is_released_when_the_others_would_do() -> None:
    limits = ScaleLimits(least=1, most=8, patience=1, cool_down=0, margin=0.1)
    # 120 / 2 = 60 with one less
    assert decide(Elasticity(limits), 3, work_s=120, training_s=67).action == "release"
    assert decide(Elasticity(limits), 3, work_s=120, training_s=66).action == "hold"


def test_a_decision_has_all_of_its_terms() -> None:
    assert decide(Elasticity(ScaleLimits(least=1, most=2)), 2, work_s=120, training_s=40) == ScaleDecision(
        action="hold",
        why="one more would pay, and there are 2 already",
        engines=2,
        generation_s=60.0,
        training_s=40.0,
        lead_s=20.0,
        saved_s=20.0,
        lost_s=60.0,
    )


def test_a_change_waits_for_several_steps_and_for_the_effect_of_the_one_before() -> None:
    elasticity = Elasticity(ScaleLimits(least=1, most=9, patience=2, cool_down=3))
    assert after(elasticity, 1, 9, work_s=900, training_s=10) == [1, 2, 2, 2, 2, 3, 3, 3, 3]


def test_a_single_odd_step_changes_nothing() -> None:
    elasticity = Elasticity(ScaleLimits(least=1, most=9, patience=2, cool_down=0))
    odd = [900.0, 20.0, 900.0, 20.0]
    assert [decide(elasticity, 2, work_s=work_s, training_s=10).action for work_s in odd] == ["hold"] * 4


def test_a_pool_that_wavers_is_left_alone() -> None:
    elasticity = Elasticity(ScaleLimits(least=1, most=9, patience=1, cool_down=0, most_changes=3, window=10))
    engines, counts = 2, []
    for step in range(10):
        engines = after(elasticity, engines, 1, work_s=900 if step % 2 == 0 else 1, training_s=10)[0]
        counts.append(engines)
    assert counts == [3, 2, 3, 3, 3, 3, 3, 3, 3, 3]
    assert after(elasticity, 3, 1, work_s=900, training_s=10) == [4], "the first change is out of the window"


@given(
    st.integers(1, 12), st.integers(1, 6), st.floats(1, 1000), st.floats(1, 100), st.floats(0, 50), st.integers(1, 3)
)
def test_a_pool_settles_within_its_limits(
    first: int, least: int, work_s: float, training_s: float, tail_s: float, patience: int
) -> None:
    most = least + 6
    limits = ScaleLimits(least=least, most=most, patience=patience, cool_down=1, most_changes=100)
    counts = after(
        Elasticity(limits), min(most, max(least, first)), 80, work_s=work_s, training_s=training_s, tail_s=tail_s
    )
    assert all(least <= count <= most for count in counts)
    assert len(set(counts[-10:])) == 1, "it does not go back and forth"
    assert counts == sorted(counts) or counts == sorted(counts, reverse=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"least": 0, "most": 3}, "least is 0; give 1 or more"),
        ({"least": 4, "most": 3}, "least is 4, and most is 3; give a least that is not above it"),
        ({"least": 1, "most": 3, "patience": 0}, "patience is 0; give 1 or more"),
        ({"least": 1, "most": 3, "margin": -0.1}, "margin is -0.1; give 0 or more"),
    ],
)
def test_limits_that_cannot_be_are_refused(given: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScaleLimits(**given)  # type: ignore[arg-type]
