"""Claims on simulated runs: schedules worked out by hand, and what holds for any run."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.config.rollout import DispatchConfig
from tailrace.errors import PlanError
from tailrace.events import Event
from tailrace.planning.dispatch.moving import LinkEnd
from tailrace.planning.lengths.base import Expectation
from tailrace.planning.packing import GroupPart
from tailrace.planning.step_times.operators import Pass
from tailrace.registers.events import EventKind
from tailrace.simulator.lengths import SimulatedLengths
from tailrace.simulator.run import SimulatedRun
from tailrace.simulator.samples import Response
from tailrace.simulator.scenario import EngineKind, Remaking, Scenario, Scorer, TrainerKind
from tailrace.types import CacheForm
from tailrace.workloads.replay import Replay, Script, Turn
from tests.simulator.test_batch import Plain


@dataclass(frozen=True)
class Paced:
    """A trainer that computes so many tokens a second."""

    tokens_per_s: float = 100.0

    def update_s(self, micro_batch: Sequence[GroupPart]) -> float:
        return sum(part.tokens for part in micro_batch) / self.tokens_per_s

    def score_s(self, micro_batch: Sequence[GroupPart]) -> float:
        return self.update_s(micro_batch) / 4

    def optimizer_s(self) -> float:
        return 2.0


class Slow(Plain):
    """Steps that take four times as long."""

    def step_s(
        self, tp: int, batch_size: float, context_tokens: float, replicas: int, others: float | None = None
    ) -> float:
        return 4 * super().step_s(tp, batch_size, context_tokens, replicas, others)

    def mixed_s(self, tp: int, batch_size: float, context_tokens: float, chunk: Pass) -> float:
        return 4 * super().mixed_s(tp, batch_size, context_tokens, chunk)


ENGINE = EngineKind(times=Plain(), slots=8, prefill_tokens=1000, arrive_s=0.5, install_s=0.25)
SMALL = Scenario(
    steps=2,
    groups_per_step=2,
    group_size=1,
    micro_batch_tokens=100,
    engines=(ENGINE,),
    trainer=TrainerKind(times=Paced(), publish_s=0.75),
)


UNSURE = Expectation.of(5.0, 1.0)


def lengths(*groups: Sequence[int], prompt: int = 10) -> Replay:
    return Replay(
        [[Script(prompt_tokens=prompt, turns=(Turn(generated_tokens=tokens),)) for tokens in group] for group in groups]
    )


def played(scenario: Scenario, replay: Replay) -> tuple[SimulatedRun, list[Event]]:
    events: list[Event] = []
    run = SimulatedRun(scenario, replay, sinks=(events.append,))
    run.run()
    return run, events


def spans(events: Sequence[Event], *kinds: EventKind) -> list[tuple[str, int | None, float, float]]:
    return [(e.task, e.step, round(e.start, 3), round(e.end, 3)) for e in events if e.task in kinds]


def test_a_synchronous_run_has_the_schedule_worked_out_by_hand() -> None:
    """Two prompts of 10 tokens: a step of 1.02 s, then steps of 1.2 s with both and of 1.1 s with one."""
    _, events = played(SMALL, lengths([3], [5], [2], [2]))
    generated = 1.02 + 2 * 1.2 + 2 * 1.1
    trained = generated + 28 / 100 + 2.0 + 0.75  # 10 + 3 and 10 + 5 tokens; the optimizer; the publication
    second = trained + 0.5 + 0.25  # the weights arrive, and are installed
    expected: list[Any] = [
        ("actor", 0, pytest.approx(generated), pytest.approx(generated + 0.28)),
        ("optimizer", 0, pytest.approx(generated + 0.28), pytest.approx(generated + 2.28)),
        ("step", 0, 0.0, pytest.approx(second)),
        ("actor", 1, pytest.approx(second + 2.22), pytest.approx(second + 2.22 + 0.24)),
        ("optimizer", 1, pytest.approx(second + 2.46), pytest.approx(second + 4.46)),
        ("step", 1, pytest.approx(second), pytest.approx(second + 4.46 + 1.5)),
    ]
    assert spans(events, EventKind.ACTOR, EventKind.OPTIMIZER, EventKind.STEP) == expected


def test_each_epoch_goes_through_all_mini_batches() -> None:
    _, events = played(replace(SMALL, mini_batches=2, epochs=2), lengths([3], [5], [2], [2]))
    scored, *updates = [e.tokens for e in events if e.task == EventKind.ACTOR and e.step == 0]
    assert (scored, updates) == (8, [3, 5, 3, 5])
    assert sum(e.task == EventKind.OPTIMIZER and e.step == 0 for e in events) == 4


def test_a_streaming_trainer_begins_with_the_first_group() -> None:
    _, events = played(replace(SMALL, streaming=True, micro_batch_tokens=13), lengths([3], [5], [2], [2]))
    actors = [event for event in events if event.task == EventKind.ACTOR and event.step == 0]
    assert [(round(event.start, 3), event.tokens) for event in actors] == [(3.42, 3), (5.62, 5)]


def test_one_step_ahead_the_engine_generates_while_the_trainer_trains() -> None:
    ahead, synchronous = replace(SMALL, max_staleness=1, weights="in_flight", steps=4), replace(SMALL, steps=4)
    replay = lengths(*[[20]] * 8)
    run, events = played(ahead, replay)
    assert run.agenda.now < played(synchronous, replay)[0].agenda.now
    assert [event.metrics["staleness_max"] for event in events if event.task == EventKind.STEP] == [0, 1, 1, 1]


def test_an_engine_that_computes_anew_what_older_weights_did_takes_longer() -> None:
    scenario, replay = replace(SMALL, max_staleness=1, weights="in_flight", steps=3), lengths(*[[40]] * 6, prompt=500)
    anew = replace(scenario, engines=(replace(ENGINE, recomputes=True),))
    assert played(anew, replay)[0].agenda.now > played(scenario, replay)[0].agenda.now


def test_weights_that_come_while_a_tool_works_leave_nothing_of_the_turn_before() -> None:
    """The weights of step 0 are installed after 8 s. The tool works until then, or is done before."""

    def end(tool_s: float) -> float:
        turns = Turn(generated_tokens=2, returned_tokens=5, tool_s=tool_s), Turn(generated_tokens=2)
        ahead = [Script(prompt_tokens=500, turns=turns)]
        replay = Replay([*lengths([3], [3]).groups, ahead, *lengths([3], [3], [3]).groups])
        _, events = played(replace(SMALL, max_staleness=1, weights="in_flight", steps=3), replay)
        return max(e.end for e in events if e.task == EventKind.SAMPLE and e.tokens == 4) - tool_s

    assert end(9.0) == pytest.approx(end(2.0) + 0.5, abs=0.01)


def test_delayed_weights_wait_for_what_has_begun() -> None:
    scenario = replace(SMALL, max_staleness=1, weights="delayed", steps=3)
    _, events = played(scenario, lengths([3], [3], [40], [40], [3], [3]))
    samples = [event for event in events if event.task == EventKind.SAMPLE]
    assert all(event.version == event.info["last_version"] for event in samples)
    in_flight = played(replace(scenario, weights="in_flight"), lengths([3], [3], [40], [40], [3], [3]))[1]
    assert any(e.version != e.info["last_version"] for e in in_flight if e.task == EventKind.SAMPLE)


def test_a_colocated_engine_stands_still_while_the_trainer_computes() -> None:
    scenario = replace(SMALL, placement="colocated", max_staleness=1, weights="in_flight", steps=3)
    replay = lengths(*[[10]] * 6)
    assert (
        played(scenario, replay)[0].agenda.now > played(replace(scenario, placement="separated"), replay)[0].agenda.now
    )


REFERENCE = Scorer(times=Paced(), workers=2)


def test_a_reference_with_devices_of_its_own_scores_beside_everything_else() -> None:
    """Groups of 13 and 15 tokens are scored by two workers as they come, at 400 tokens a second."""
    _, events = played(replace(SMALL, steps=1, reference=REFERENCE), lengths([3], [5]))
    ends = [1.02 + 2 * 1.2, 1.02 + 2 * 1.2 + 2 * 1.1]
    scored = [(e.start, e.end, e.samples, e.worker) for e in events if e.task == EventKind.REFERENCE]
    expected: list[Any] = [
        (pytest.approx(ends[0]), pytest.approx(ends[0] + 13 / 400), 1, "reference-0"),
        (pytest.approx(ends[1]), pytest.approx(ends[1] + 15 / 400), 1, "reference-1"),
    ]
    assert scored == expected


def test_a_colocated_reference_takes_turns_with_engine_and_trainer() -> None:
    """The engine stands still while the first group is scored, from the end of the step under way on."""
    scenario = replace(SMALL, steps=1, placement="colocated", reference=replace(REFERENCE, workers=1))
    _, events = played(scenario, lengths([3], [5]))
    first = 1.02 + 2 * 1.2  # the shorter one has ended; a step of the longer one is under way
    (one, other) = (event for event in events if event.task == EventKind.REFERENCE)
    assert [one.start, one.end] == pytest.approx([first + 1.1, first + 1.1 + 13 / 400])
    assert [other.start, other.end] == pytest.approx([one.end + 1.1, one.end + 1.1 + 15 / 400])
    (actor,) = (event for event in events if event.task == EventKind.ACTOR)
    assert actor.start == other.end


def test_colocated_workers_of_a_reference_share_what_they_score() -> None:
    """Two groups that end together are one claim."""
    scenario = replace(SMALL, steps=1, placement="colocated", reference=REFERENCE)
    _, events = played(scenario, lengths([5], [5]))
    (scored,) = (event for event in events if event.task == EventKind.REFERENCE)
    assert scored.samples == 2
    assert scored.end - scored.start == pytest.approx(15 / 400)


CRITIC = TrainerKind(times=Paced(50.0))


def test_a_critic_gives_values_before_the_advantages_and_trains_beside_the_policy() -> None:
    """Groups of 13 and 15 tokens get values as they come, at 200 tokens a second, and are trained on at 50 a second.

    The second step begins to generate when the critic has been trained, too, which takes longer than the policy.
    """
    _, events = played(replace(SMALL, critic=CRITIC), lengths([3], [5], [2], [2]))
    first, last = 1.02 + 2 * 1.2, 1.02 + 2 * 1.2 + 2 * 1.1
    values = [(e.start, e.end, e.step, e.worker, e.actor, e.version) for e in events if e.task == "values"]
    expected: list[Any] = [
        (pytest.approx(first), pytest.approx(first + 13 / 200), 0, "critic", "trainer", None),
        (pytest.approx(last), pytest.approx(last + 15 / 200), 0, "critic", "trainer", None),
    ]
    assert values[:2] == expected
    trained = [e for e in events if e.task in (EventKind.ACTOR, EventKind.OPTIMIZER) and e.step == 0]
    spent = {(e.task, e.actor): (e.start, e.end) for e in trained}
    begun = last + 15 / 200
    times: dict[Any, Any] = {
        ("actor", "trainer"): (pytest.approx(begun), pytest.approx(begun + 0.28)),
        ("optimizer", "trainer"): (pytest.approx(begun + 0.28), pytest.approx(begun + 2.28)),
        ("actor", "critic"): (pytest.approx(begun), pytest.approx(begun + 0.56)),
        ("optimizer", "critic"): (pytest.approx(begun + 0.56), pytest.approx(begun + 2.56)),
    }
    assert spent == times
    (step, _) = (event for event in events if event.task == EventKind.STEP)
    assert step.end == pytest.approx(begun + 2.28 + 0.75 + 0.5 + 0.25)


def test_prompts_wait_for_the_update_of_a_critic() -> None:
    slow = TrainerKind(times=Paced(5.0))
    _, events = played(replace(SMALL, critic=slow), lengths([3], [5], [2], [2]))
    ended = next(e.end for e in events if e.task == EventKind.OPTIMIZER and e.actor == "critic")
    assert ended > next(e.end for e in events if e.task == EventKind.STEP)
    assert min(e.start for e in events if e.task == EventKind.SAMPLE and e.step == 1) == pytest.approx(ended)


def test_a_colocated_critic_takes_turns_with_engine_and_trainer() -> None:
    """The engine stands still for the values of the first group; then the two models are trained in turns."""
    _, events = played(replace(SMALL, steps=1, placement="colocated", critic=CRITIC), lengths([3], [5]))
    first = 1.02 + 2 * 1.2  # the shorter one has ended; a step of the longer one is under way
    work = [e for e in events if e.task in ("values", EventKind.ACTOR, EventKind.OPTIMIZER)]
    values, others = work[:2], work[2:]
    assert [values[0].start, values[0].end] == pytest.approx([first + 1.1, first + 1.1 + 13 / 200])
    assert [values[1].start, values[1].end] == pytest.approx([values[0].end + 1.1, values[0].end + 1.1 + 15 / 200])
    assert sorted((e.task, e.actor) for e in others) == [
        (task, actor) for task in ("actor", "optimizer") for actor in ("critic", "trainer")
    ]
    assert [e.start for e in others] == [values[1].end, *(e.end for e in others[:-1])]


def test_a_critic_goes_through_the_same_epochs_and_mini_batches() -> None:
    scenario = replace(SMALL, mini_batches=2, epochs=2, critic=CRITIC)
    _, events = played(scenario, lengths([3], [5], [2], [2]))
    each = {
        actor: [e.tokens for e in events if e.task == EventKind.ACTOR and e.step == 0 and e.actor == actor]
        for actor in ("trainer", "critic")
    }
    assert each["critic"] == each["trainer"] == [8, 3, 5, 3, 5]


@pytest.mark.parametrize("critic", [None, CRITIC])
def test_advantages_of_whole_steps_wait_for_the_last_response(critic: TrainerKind | None) -> None:
    scenario = replace(SMALL, streaming=True, micro_batch_tokens=13, critic=critic)
    _, events = played(replace(scenario, whole_steps=True), lengths([3], [5], [2], [2]))
    last = max(e.end for e in events if e.task in (EventKind.SAMPLE, "values") and e.step == 0)
    actors = [e.start for e in events if e.task == EventKind.ACTOR and e.step == 0]
    assert min(actors) == last
    of_groups = [e.start for e in played(scenario, lengths([3], [5], [2], [2]))[1] if e.task == EventKind.ACTOR]
    assert min(of_groups) < last


def all_equal(rows: Sequence[Mapping[str, Any]]) -> bool:
    return len({row["reward"] for row in rows}) == 1


def with_rewards(replay: Replay) -> Replay:
    """The same with rewards of 0 and 1."""
    return replay.map(lambda script: replace(script, reward=float(script.tokens % 2)))


def test_a_place_is_remade_as_often_as_it_may_be_and_each_time_with_another_prompt() -> None:
    """Two prompts of 10 tokens: a step of 1.02 s and two of 1.2 s. Then both places are remade twice, one after the
    other: a step of 1.01 s with one prompt, one of 1.11 s with the other, and the rest of both, 1.2 and 1.1 s."""
    scenario = replace(SMALL, steps=1, remaking=Remaking(decide=all_equal, most=2))
    _, events = played(scenario, with_rewards(lengths([3], [3])))
    made = Counter(event.info["group"] for event in events if event.task == EventKind.SAMPLE)
    assert made == {0: 3, 1: 3}
    (step,) = (event for event in events if event.task == EventKind.STEP)
    assert (step.samples, step.metrics["remade_groups"]) == (2, 4.0)
    (trained,) = (event for event in events if event.task == EventKind.ACTOR)
    assert trained.start == pytest.approx(1.02 + 2 * 1.2 + 2 * (1.01 + 1.11 + 1.2 + 1.1))
    assert "remade_groups" not in played(replace(scenario, remaking=None), lengths([3], [3]))[1][-1].metrics


@pytest.mark.parametrize(("kept", "times"), [(False, 3), (True, 1), (None, 1)])
def test_without_rewards_those_groups_are_remade_that_the_source_had_filtered(kept: bool | None, times: int) -> None:
    scenario = replace(SMALL, steps=1, remaking=Remaking(decide=all_equal, most=2))
    _, events = played(scenario, lengths([3], [3]).map(lambda script: replace(script, kept=kept)))
    assert Counter(event.info["group"] for event in events if event.task == EventKind.SAMPLE) == {0: times, 1: times}


def test_attempts_are_the_groups_that_are_generated_for_each_that_is_trained_on() -> None:
    remaking = Remaking(decide=all_equal, most=2)
    assert remaking.attempts(0.5) == 1 + 1 / 2 + 1 / 4
    assert remaking.rounds(0.5, 1) == remaking.attempts(0.5)
    assert remaking.rounds(0.5, 2) == 1 + (1 - 1 / 4) + (1 - 9 / 16)
    assert remaking.attempts(0.0) == remaking.rounds(0.0, 100) == 1


def test_the_same_groups_take_the_places_of_others_however_often_what_was_drawn_is_repeated() -> None:
    drawn = with_rewards(lengths([3, 5], [3, 4], [1, 1], [1, 2], [7, 8], [9, 9]))
    scenario = replace(SMALL, steps=3, group_size=2, remaking=Remaking(decide=all_equal, most=2))

    def made(times: int) -> list[Counter[tuple[int, int | None]]]:
        events: list[Event] = []
        replay = Replay([*drawn.groups] * times)
        SimulatedRun(
            replace(scenario, steps=3 * times), replay, sinks=(events.append,), samples=True, drawn=drawn
        ).run()
        samples = [event for event in events if event.task == EventKind.SAMPLE]
        return [
            Counter((e.info["group"] % 6, e.tokens) for e in samples if e.info["group"] // 6 == time)
            for time in range(times)
        ]

    (once,) = made(1)
    assert sum(once.values()) > 12
    assert made(3) == [once] * 3


@pytest.mark.parametrize(
    ("decide", "said"),
    [
        (lambda rows: bool(rows[0]["entropy"]), "has failed: KeyError: 'entropy'"),
        (lambda rows: int(rows[0]["reward"]) == 1, "has failed: ValueError: cannot convert float NaN to integer"),
    ],
)
def test_an_algorithm_whose_decision_to_remake_fails_is_refused_in_one_line(
    decide: Callable[[Sequence[Mapping[str, Any]]], bool], said: str
) -> None:
    script = Script(prompt_tokens=9, turns=(Turn(generated_tokens=3),))
    replay = Replay([[script, replace(script, reward=0.5)]] * 4)
    with pytest.raises(PlanError, match=re.escape(said)):
        played(replace(SMALL, group_size=2, remaking=Remaking(decide=decide, most=1)), replay)


def test_what_scores_waits_for_no_grading() -> None:
    scenario = replace(SMALL, steps=1, grade_s=50.0, reference=REFERENCE, critic=CRITIC)
    _, events = played(scenario, lengths([3], [5]))
    assert all(e.end < 50.0 for e in events if e.task in ("values", EventKind.REFERENCE))
    assert all(e.start > 50.0 for e in events if e.task == EventKind.ACTOR)


def test_tools_make_a_response_wait_and_its_next_turn_computes_only_what_they_return() -> None:
    script = Script(
        prompt_tokens=10,
        turns=(Turn(generated_tokens=2, returned_tokens=100, tool_s=5.0), Turn(generated_tokens=2)),
    )
    _, events = played(replace(SMALL, steps=1, groups_per_step=1), Replay([[script]]))
    (sample,) = [event for event in events if event.task == EventKind.SAMPLE]
    assert sample.end == pytest.approx((1.01 + 1.1) + 5.0 + (1.101 + 1.1))
    assert sample.tokens == 4


def test_expectations_that_err_change_the_order_in_which_responses_begin() -> None:
    scenario = replace(
        SMALL,
        steps=1,
        groups_per_step=8,
        order="longest_first",
        knows_lengths="lengths",
        engines=(replace(ENGINE, slots=1),),
    )
    replay = lengths(*([tokens] for tokens in range(1, 9)))

    def order(error: float) -> list[int | None]:
        samples = played(replace(scenario, expectation_error=error), replay)[1]
        return [event.tokens for event in samples if event.task == EventKind.SAMPLE]

    assert order(0.0) == [8, 7, 6, 5, 4, 3, 2, 1]
    assert order(2.0) != order(0.0)


def test_a_scout_of_each_group_begins_first_and_the_others_by_what_it_tells() -> None:
    """One after the other: four scouts, then the others of groups that are not known to be short, then these."""
    scenario = replace(
        SMALL,
        steps=1,
        groups_per_step=4,
        group_size=2,
        order="longest_first",
        knows_lengths="siblings",
        engines=(replace(ENGINE, slots=1),),
    )
    groups = [[1, 1], [3, 3], [90, 90], [20, 20]]
    _, events = played(scenario, lengths(*groups))
    ended = [(event.info["group"], event.info["sample"]) for event in events if event.task == EventKind.SAMPLE]
    assert {sample for _, sample in ended[:4]} == {0}
    assert {group for group, _ in ended[4:6]} == {2, 3}
    assert [group for group, _ in ended[6:]] == [1, 0]


def test_what_is_learned_from_siblings_is_forgotten_with_newer_versions() -> None:
    scenario = replace(SMALL, steps=1, knows_lengths="siblings", group_size=2)
    found = {discount: SimulatedLengths(replace(scenario, lengths_discount=discount), 100) for discount in (1.0, 0.5)}
    script = lengths([10]).groups[0][0]
    expected = {}
    for discount, each in found.items():
        for group, (tokens, version) in enumerate([(10, 0), (1000, 9)]):
            response = Response(
                step=0,
                group=group,
                number=0,
                prompt=group,
                script=script,
                tokens=tokens,
                needed=0,
                expected=UNSURE,
                limit=1000,
            )
            response.first_version = version
            each.learn(response)
        expected[discount] = each.of(2, [script])[0].tokens
    assert expected[1.0] == pytest.approx(100)
    assert expected[0.5] > 900


def test_a_cache_that_does_not_hold_the_longest_sample_is_refused() -> None:
    scenario = replace(SMALL, engines=(replace(ENGINE, cache_tokens=30),))
    with pytest.raises(
        PlanError, match="the cache of an engine of rollout holds 30 tokens, and the longest sample has 35"
    ):
        SimulatedRun(scenario, lengths([3], [25], [2], [2]))


def test_what_waits_at_one_replica_goes_to_another_with_nothing_waiting() -> None:
    """The four samples of a group go to one of two replicas, each of which decodes one at a time."""
    engine = replace(ENGINE, dp=2, slots=1)
    scenario = replace(SMALL, steps=1, groups_per_step=1, group_size=4, engines=(engine,))
    _, events = played(scenario, lengths([10, 10, 10, 10]))
    ends = sorted(event.end for event in events if event.task == EventKind.SAMPLE)
    assert ends[0] == pytest.approx(ends[1])
    assert ends[3] == pytest.approx(2 * ends[0] - 9 * 1e-3), "all but the last token of its prompt is cached"


@pytest.mark.parametrize(("prompt", "engines"), [(10, 2), (100_000, 1)])
def test_a_group_is_split_where_its_prompt_costs_less_than_a_response(prompt: int, engines: int) -> None:
    scenario = replace(
        SMALL,
        steps=1,
        groups_per_step=1,
        group_size=2,
        engines=(replace(ENGINE, engines=2),),
        dispatch=DispatchConfig(policy="skewness_aware"),
        knows_lengths="lengths",
        moves=False,
    )
    _, events = played(scenario, lengths([30, 40], prompt=prompt))
    assert len({event.worker for event in events if event.task == EventKind.SAMPLE}) == engines


def test_the_same_run_has_the_same_events() -> None:
    scenario = replace(SMALL, engines=(replace(ENGINE, engines=3),), streaming=True, steps=2)
    replay = lengths([3], [5], [7], [2])
    assert played(scenario, replay)[1] == played(scenario, replay)[1]


LINKED = LinkEnd(form=CacheForm(name="kept", token_bytes=100), byte_s=5e-5)
"""A token takes 0.01 s from one such engine to another."""

SCENARIOS = st.builds(
    Scenario,
    steps=st.just(3),
    groups_per_step=st.integers(1, 5),
    group_size=st.integers(1, 4),
    mini_batches=st.integers(1, 2),
    epochs=st.integers(1, 2),
    micro_batch_tokens=st.integers(1, 200),
    placement=st.sampled_from(["colocated", "separated"]),
    max_staleness=st.integers(0, 3),
    streaming=st.booleans(),
    in_order=st.booleans(),
    weights=st.sampled_from(["synchronous", "delayed", "sub_step", "in_flight"]),
    dispatch=st.builds(
        DispatchConfig, policy=st.sampled_from(["pull", "round_robin", "least_loaded", "skewness_aware"])
    ),
    order=st.sampled_from(["first_in", "longest_first", "shortest_first"]),
    knows_lengths=st.sampled_from(["nothing", "group_means", "lengths", "siblings"]),
    engines=st.lists(
        st.builds(
            EngineKind,
            name=st.sampled_from(["a", "b"]),
            engines=st.integers(1, 3),
            times=st.sampled_from([Plain(), Slow()]),
            dp=st.integers(1, 2),
            slots=st.integers(1, 6),
            cache_tokens=st.integers(100, 1000),
            block=st.just(1),
            starts_s=st.floats(0, 5),
            arrive_s=st.floats(0, 5),
            install_s=st.floats(0, 1),
            recomputes=st.booleans(),
            link=st.sampled_from([LinkEnd(form=None), LINKED]),
        ),
        min_size=1,
        max_size=2,
    ).map(tuple),
    trainer=st.builds(TrainerKind, times=st.just(Paced()), ranks=st.integers(1, 3), publish_s=st.floats(0, 2)),
    reference=st.none() | st.builds(Scorer, times=st.just(Paced()), workers=st.integers(1, 2)),
    critic=st.none() | st.builds(TrainerKind, times=st.just(Paced(50.0)), ranks=st.integers(1, 2)),
    whole_steps=st.booleans(),
    graders=st.integers(1, 4),
    grade_s=st.floats(0, 3),
    hop_s=st.floats(0, 0.1),
    engine_failures_per_hour=st.sampled_from([0.0, 30.0]),
    restart_s=st.floats(0, 5),
    engine_beside=st.sampled_from([1.0, 1.5]),
    trainer_beside=st.sampled_from([1.0, 1.5]),
)


def replays(scenario: Scenario) -> st.SearchStrategy[Replay]:
    """Any lengths for a scenario."""
    count = scenario.steps * scenario.groups_per_step
    tokens = st.lists(st.integers(1, 40), min_size=scenario.group_size, max_size=scenario.group_size)
    return st.lists(tokens, min_size=count, max_size=count).map(lambda groups: lengths(*groups))


@given(SCENARIOS, st.data())
@settings(max_examples=150, deadline=None)
def test_every_sample_is_trained_on_once_and_none_is_too_stale(scenario: Scenario, data: st.DataObject) -> None:
    check_conservation(scenario, data.draw(replays(scenario)))


@given(SCENARIOS, st.integers(1, 3), st.data())
@settings(max_examples=50, deadline=None)
def test_a_step_trains_on_one_group_for_each_place_however_often_it_is_remade(
    any_scenario: Scenario, most: int, data: st.DataObject
) -> None:
    scenario = replace(any_scenario, whole_steps=False, remaking=Remaking(decide=all_equal, most=most))
    replay = with_rewards(data.draw(replays(scenario)))
    _, events = played(scenario, replay)
    made = Counter(event.info["group"] for event in events if event.task == EventKind.SAMPLE)
    again = {group: times // scenario.group_size - 1 for group, times in made.items()}
    assert all(times % scenario.group_size == 0 for times in made.values())
    steps = [event for event in events if event.task == EventKind.STEP]
    assert {event.samples for event in steps} == {scenario.groups_per_step * scenario.group_size}
    assert all(event.metrics["staleness_max"] <= scenario.max_staleness for event in steps)
    assert set(again) == set(range(scenario.steps * scenario.groups_per_step))
    assert set(again.values()) <= set(range(most + 1))
    assert sum(event.metrics["remade_groups"] for event in steps) == sum(again.values())
    last = {(event.info["group"], event.info["sample"]): event for event in events if event.task == EventKind.SAMPLE}
    for step in steps:
        assert step.tokens == sum(event.tokens or 0 for event in last.values() if event.step == step.step)
    for group, scripts in enumerate(replay.groups):
        equal = all_equal([{"reward": script.reward} for script in scripts])
        assert (again[group] > 0) == equal


def check_conservation(scenario: Scenario, replay: Replay) -> list[Event]:
    """Check that a run makes and trains on every sample once, within the bound of staleness. Return its events."""
    count = scenario.steps * scenario.groups_per_step
    _, events = played(scenario, replay)
    steps = [event for event in events if event.task == EventKind.STEP]
    samples = [event for event in events if event.task == EventKind.SAMPLE]
    made = Counter((event.info["group"], event.info["sample"]) for event in samples)
    assert made == Counter((group, number) for group in range(count) for number in range(scenario.group_size))
    assert sum(event.tokens or 0 for event in samples) == sum(s.tokens for group in replay.groups for s in group)
    assert [event.step for event in steps] == list(range(scenario.steps))
    if scenario.critic is not None:
        valued = [event for event in events if event.task == "values"]
        updated = [event for event in events if event.task == EventKind.OPTIMIZER and event.actor == "critic"]
        assert sum(event.samples or 0 for event in valued) == count * scenario.group_size
        assert len(updated) == sum(e.task == EventKind.OPTIMIZER and e.actor == "trainer" for e in events)
    assert sum(event.samples or 0 for event in steps) == count * scenario.group_size
    assert all(event.metrics["staleness_max"] <= scenario.max_staleness for event in steps)
    return events


def test_workers_of_one_machine_slow_each_other_down_while_both_work() -> None:
    replay = lengths(*[[10]] * 6, prompt=1)
    alone = replace(SMALL, steps=3, max_staleness=1, weights="in_flight", streaming=True)
    beside = replace(alone, engine_beside=1.25, trainer_beside=1.5)
    seconds = [played(scenario, replay)[0].agenda.now for scenario in (alone, beside)]
    assert seconds[0] < seconds[1] < 1.5 * seconds[0]
    apart = replace(beside, max_staleness=0, weights="synchronous", streaming=False)
    assert (
        played(apart, replay)[0].agenda.now
        == played(replace(apart, engine_beside=1, trainer_beside=1), replay)[0].agenda.now
    )  # they take turns


def test_what_a_dead_engine_had_is_made_again_elsewhere() -> None:
    scenario = replace(SMALL, engines=(replace(ENGINE, engines=2),), engine_failures_per_hour=90, restart_s=2.0)
    replay = lengths([30], [40], [30], [40])
    run, events = played(replace(scenario, seed=3), replay)
    deaths = [event for event in events if event.task == EventKind.WORKER_DIED]
    assert deaths
    assert run.agenda.now > played(replace(scenario, engine_failures_per_hour=0), replay)[0].agenda.now
    samples = [(event.info["group"], event.tokens) for event in events if event.task == EventKind.SAMPLE]
    assert sorted(samples) == [(0, 30), (1, 40), (2, 30), (3, 40)]


def test_a_long_response_moves_to_an_engine_with_room_when_that_pays() -> None:
    """Two engines; one has three long responses, since all were expected to be short."""
    crowded = replace(
        SMALL,
        steps=1,
        groups_per_step=4,
        engines=(replace(ENGINE, engines=2, times=Plain(each=1.0)),),
        dispatch=DispatchConfig(policy="skewness_aware"),
        knows_lengths="lengths",
        order="longest_first",
    )
    replay = lengths([100], [90], [80], [5])
    moved, stayed = (played(replace(crowded, moves=moves), replay)[0] for moves in (True, False))
    assert moved.agenda.now <= stayed.agenda.now
    assert moved.moved > 0 == stayed.moved


@pytest.mark.parametrize(("before", "of_long_ones"), [([100] * 20, 1), ([400] * 4 + [100] * 16, 2)])
def test_streamrl_shares_engines_out_by_the_lengths_that_have_come(before: list[int], of_long_ones: int) -> None:
    """A second step of 4 long responses and 16 others. Algorithm 2 weighs the two kinds of engines by the median and
    the 90th percentile of all that have ended: 100 and 100 tokens, or 100 and 400."""
    scenario = replace(
        SMALL,
        groups_per_step=20,
        engines=(replace(ENGINE, engines=4, slots=32, times=Plain(each=1.0)),),
        dispatch=DispatchConfig(policy="streamrl"),
        knows_lengths="group_means",
        order="longest_first",
        moves=False,
    )
    _, events = played(scenario, lengths(*([tokens] for tokens in [*before, *[400] * 4, *[100] * 16])))
    long = [event for event in events if event.task == EventKind.SAMPLE and event.step == 1 and event.tokens == 400]
    assert len({event.worker for event in long}) == of_long_ones


def test_engines_that_are_predicted_to_be_faster_are_given_more() -> None:
    """Two pools; the steps of one take four times as long."""
    slow = replace(ENGINE, name="slow", times=Slow(), install_s=1.0)
    scenario = replace(
        SMALL,
        steps=1,
        groups_per_step=24,
        engines=(replace(ENGINE, slots=32), replace(slow, slots=32)),
        dispatch=DispatchConfig(policy="skewness_aware"),
        knows_lengths="lengths",
        order="longest_first",
        moves=False,
    )
    replay = lengths(*[[20]] * 24)
    run, events = played(scenario, replay)
    made = Counter(event.worker for event in events if event.task == EventKind.SAMPLE)
    assert made["rollout-0"] > 2 * made["slow-0"] > 0
    in_turn = replace(scenario, dispatch=DispatchConfig(policy="round_robin"))
    assert run.agenda.now < played(in_turn, replay)[0].agenda.now


def test_engines_that_die_too_often_end_the_simulation_in_one_line() -> None:
    with pytest.raises(PlanError, match="a response of 300 tokens was lost 50 times"):
        played(replace(SMALL, steps=1, engine_failures_per_hour=3600), lengths([300], [300]))
