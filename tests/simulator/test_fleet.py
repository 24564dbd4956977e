"""Claims on a simulated run that chooses the number of its engines."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.config.weights import WeightsMode
from tailrace.events import Event
from tailrace.planning.elasticity import ScaleLimits
from tailrace.registers.events import EventKind
from tailrace.registers.metrics import METRICS
from tailrace.simulator.run import SimulatedRun
from tailrace.simulator.scenario import Elastic, Scenario, TrainerKind
from tailrace.workloads.replay import Replay
from tests.simulator.test_run import ENGINE, SCENARIOS, SMALL, Paced, check_conservation, lengths, played, replays

STEPS = 10
GROWS = replace(
    SMALL,
    steps=STEPS,
    groups_per_step=6,
    engines=(replace(ENGINE, slots=2),),
    elastic=Elastic(
        limits=ScaleLimits(least=1, most=3, patience=1, cool_down=0), joining=replace(ENGINE, slots=2, starts_s=4.0)
    ),
)


def changes(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event.task == EventKind.SCALE]


def growing(*tokens: int) -> Replay:
    """Steps whose responses have so many tokens."""
    return lengths(*[[each] for each in tokens for _ in range(6)])


def test_engines_are_added_while_generation_is_the_longer_one_and_released_when_it_is_not() -> None:
    scenario = replace(GROWS, steps=8, trainer=TrainerKind(times=Paced(20.0)))
    run, events = played(scenario, growing(*[100] * 4, *[1] * 4))
    scaled = changes(events)
    assert scaled[0].info["text"].startswith("1 → 2 engines, by elasticity: generation is the longer one")
    assert scaled[0].metrics.keys() == {metric.name for metric in METRICS if EventKind.SCALE in metric.of}
    assert scaled[0].info["engines"] == ["rollout-0", "rollout-1"]
    counts = [len(event.info["engines"]) for event in scaled]
    assert counts[:3] == [2, 3, 2]
    assert run.present.total() == counts[-1]


def test_an_engine_that_joins_loads_gets_the_newest_weights_and_generates() -> None:
    run, events = played(replace(GROWS, max_staleness=1, weights="in_flight", streaming=True), growing(*[100] * STEPS))
    (first, *_) = changes(events)
    decided = max(event.end for event in events if event.task == EventKind.STEP and event.end < first.end)
    assert first.end == decided + 4.0
    installed = [event for event in events if event.worker == "rollout-1" and event.task == EventKind.UPDATE_WEIGHTS]
    assert 0 <= installed[0].start - first.end - ENGINE.arrive_s <= 1.2, "at once, or after the step under way"
    made = [event for event in events if event.worker == "rollout-1" and event.task == EventKind.SAMPLE]
    assert made
    assert all(event.start >= first.end for event in made)
    assert run.present["rollout"] > 1


def with_one_released(weights: WeightsMode) -> tuple[SimulatedRun, Sequence[Event], Event]:
    """A run that releases one of three engines, and the event of that.

    While the short responses of the first step are trained on, the long ones of the second are generated.
    """
    limits = ScaleLimits(least=2, most=3, patience=1, cool_down=0)
    ahead = replace(GROWS, steps=3, max_staleness=1, weights=weights, trainer=TrainerKind(times=Paced(2.0)))
    engine = replace(ENGINE, engines=3, slots=2)
    elastic = Elastic(limits=limits, joining=replace(engine, engines=1))
    run, events = played(replace(ahead, engines=(engine,), elastic=elastic), growing(3, 80, 80))
    (released,) = changes(events)
    return run, events, released


def test_what_a_released_engine_has_begins_anew_where_a_response_has_one_version() -> None:
    run, events, released = with_one_released("delayed")
    assert released.info["text"].startswith("3 → 2 engines, by elasticity: generation would be the shorter one")
    samples = [event for event in events if event.task == EventKind.SAMPLE]
    assert Counter(event.step for event in samples) == {0: 6, 1: 6, 2: 6}
    of_step = [event for event in samples if event.step == 1]
    assert {event.worker for event in of_step} == {"rollout-0", "rollout-1"}
    anew = [event for event in of_step if event.start >= released.start]
    assert len(anew) == 2, "those of the third engine"
    assert run.present == {"rollout": 2}


def test_what_an_engine_has_goes_on_elsewhere_when_it_is_released() -> None:
    run, events, released = with_one_released("in_flight")
    assert released.info["text"].startswith("3 → 2 engines, by elasticity: generation would be the shorter one")
    assert released.info["engines"] == ["rollout-0", "rollout-1"]
    samples = [event for event in events if event.task == EventKind.SAMPLE]
    assert Counter(event.step for event in samples) == {0: 6, 1: 6, 2: 6}
    under_way = [event for event in samples if event.start < released.start < event.end]
    assert len(under_way) == 6
    assert {event.worker for event in under_way} == {"rollout-0", "rollout-1"}
    assert run.present == {"rollout": 2}


def test_without_bounds_the_number_stays() -> None:
    run, events = played(replace(GROWS, elastic=None), growing(*[100] * STEPS))
    assert changes(events) == []
    assert run.present == {"rollout": 1}


@given(SCENARIOS, st.integers(1, 3), st.floats(0, 20), st.data())
@settings(max_examples=100, deadline=None)
def test_whoever_comes_and_goes_every_sample_is_trained_on_once(
    scenario: Scenario, least: int, starts_s: float, data: st.DataObject
) -> None:
    pool = scenario.engines[0]
    scenario = replace(
        scenario,
        steps=8,
        placement="separated",
        elastic=Elastic(
            limits=ScaleLimits(least=least, most=4, patience=1, cool_down=0, most_changes=20),
            joining=replace(pool, engines=1, starts_s=starts_s),
        ),
    )
    check_conservation(scenario, data.draw(replays(scenario)))
