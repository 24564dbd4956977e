"""Decisions to change the TP degree.

The example throughout: 2 ranks; a step takes 10 ms at TP 1 and 6 ms at TP 2, and 1 ms more for each sequence of the
replica, whatever the contexts. Each replica of TP 1 has one sequence, of 200 and 100 tokens of context. Weights take
0.1 s, the rest 0.02 s, groups 0.05 s; a token's keys and values are 1 MB, of which a rank sends 1 GB a second.

    A: 200 and 100 tokens remain.  TP 1: max(200, 100) · 11 ms                                     = 2.2  s
                                   TP 2: 100 · 8 ms + 100 · 7 ms                                   = 1.5  s
                                   switch: 0.1 + 0.02 + 0.05 + 200 · 1 MB / (1 GB/s)               = 0.37 s → switch
    B: half of these remain.       TP 1: 1.1 s; TP 2: 0.75 s + 0.37 s = 1.12 s                              → stay
"""

import itertools
from collections.abc import Sequence
from math import lcm
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.config.engine import AdaptiveTPConfig
from tailrace.errors import ConfigError
from tailrace.planning.drain import Work, drain, drain_s
from tailrace.planning.latency import DecodedStep, LatencyPredictor
from tailrace.planning.remaining import (
    Bound,
    LengthHistory,
    Ranked,
    RemainingEstimate,
    Survival,
    Unfinished,
    make_estimate,
)
from tailrace.planning.tp_course import InOrder
from tailrace.planning.tp_decision import Candidate, Decision, Snapshot
from tailrace.planning.tp_merge import context, counted_once, merge, sent_bytes
from tailrace.planning.tp_profile import SwitchCost, TPProfile
from tailrace.planning.tp_switch import SwitchController
from tests.planning.tp_profiles import StepFormula, flat, made_profile

STEP = flat({1: 0.010, 2: 0.006})


def controller_of(profile: TPProfile, estimate: RemainingEstimate | None = None, **changes: Any) -> SwitchController:
    plain = {"max_batch_size": 64, "least_gain": 0.02, "steps_between": 128, "look_ahead": False}
    return SwitchController(profile, estimate or Bound(), **(plain | changes))


def controller(**changes: Any) -> SwitchController:
    return controller_of(made_profile(STEP, **changes))


def one(context: int, most: int) -> Unfinished:
    return Unfinished(context=context, generated=0, most=most)


def example(first: int, second: int, **changes: Any) -> Snapshot:
    fields: dict[str, Any] = {
        "tp": 1,
        "degrees": (1, 2),
        "replicas": ((one(200, first),), (one(100, second),)),
        "kv_bytes_per_token": 1_000_000,
    }
    return Snapshot(**(fields | changes))


def of(decision: Decision, tp: int) -> Candidate:
    return next(candidate for candidate in decision.candidates if candidate.tp == tp)


def test_example_a_switches_with_the_figures_worked_out_above() -> None:
    decision = controller().decide(example(200, 100))
    assert (decision.tp, decision.chosen, decision.switch) == (1, 2, True)
    assert decision.current_s == pytest.approx(2.2)
    two = of(decision, 2)
    assert two.batch_sizes == (2,)
    assert two.remaining_s == pytest.approx(1.5)
    assert (two.groups_s, two.reshard_s, two.rest_s, two.capture_s) == (0.05, 0.1, 0.02, 0.0)
    assert two.move_s == pytest.approx(0.2)
    assert two.recompute_s == pytest.approx(0.3), "1 ms for each of 200 and 100 tokens"
    assert two.state == "move"
    assert two.switch_s == pytest.approx(0.37)
    assert two.total_s == pytest.approx(1.87)
    assert decision.reason == "TP 2 in 1.87 s instead of TP 1 in 2.2 s"


def test_example_b_stays_since_the_switch_costs_more_than_it_saves() -> None:
    decision = controller().decide(example(100, 50))
    assert (decision.chosen, decision.switch) == (1, False)
    assert of(decision, 2).total_s == pytest.approx(1.12)
    assert decision.reason == "TP 1 in 1.1 s; the next best, TP 2 in 1.12 s, saves nothing"


def test_groups_that_exist_cost_nothing() -> None:
    decision = controller().decide(example(100, 50, groups=frozenset({2})))
    assert of(decision, 2).groups_s == 0.0
    assert of(decision, 2).total_s == pytest.approx(1.07)
    assert decision.switch


def test_a_gain_below_the_least_one_is_left() -> None:
    snapshot = example(100, 50, groups=frozenset({2}))  # 1.07 s instead of 1.1 s, 2.7 % less
    decision = controller_of(made_profile(STEP), least_gain=0.03).decide(snapshot)
    assert not decision.switch
    assert decision.reason == "TP 2 in 1.07 s saves less than 3% a switch of TP 1 in 1.1 s"


def test_the_way_back_to_the_degree_of_the_full_batch_counts() -> None:
    # as example A; from TP 2 back to TP 1 the weights and the rest, 0.12 s
    away = controller().decide(example(200, 100, home_tp=1))
    assert [of(away, tp).return_s for tp in (1, 2)] == pytest.approx([0.0, 0.12])
    assert of(away, 2).total_s == pytest.approx(1.99)
    home = controller().decide(example(200, 100, home_tp=2))
    assert [of(home, tp).return_s for tp in (1, 2)] == pytest.approx([0.17, 0.0]), "its groups are still to be made"
    assert home.current_s == pytest.approx(2.37)


def test_where_several_ways_take_as_long_the_one_with_the_fewest_switches_is_chosen() -> None:
    # TP 1 until one is left, TP 2, and back: 1 s + 0.05 s + 900 · 7.1 ms + 0.05 s
    # TP 2 at once:                           0.05 s + 100 · 10.6 ms + 900 · 7.1 ms
    def step(tp: int, sequences: int, _: int, __: int) -> float:
        return 0.010 if tp == 1 else 0.0066 + 0.0005 * sequences

    decision = crossing(step, look_ahead=True).decide(draining(1, SHRINKING))
    two, one = of(decision, 1), of(decision, 2)
    assert (two.switches, one.switches) == (2, 1)
    assert [two.total_s, one.total_s] == pytest.approx([7.49, 7.50], rel=0.003)
    assert two.total_s < one.total_s
    assert decision.chosen == 2


def test_a_batch_that_was_never_fuller_ends_with_the_degree_that_it_begins_with() -> None:
    begins = controller().decide(example(200, 100, home_tp=None))
    assert [of(begins, tp).return_s for tp in (1, 2)] == [0.0, 0.0]


def test_a_later_switch_home_is_no_way_back_to_be_paid_for() -> None:
    begun = msgspec.structs.replace(draining(1, SHRINKING), home_tp=2)
    stay = of(crossing(look_ahead=True).decide(begun), 1)
    assert [tp for tp, _ in stay.later] == [2]
    assert stay.return_s == 0.0
    assert stay.total_s == stay.plan_s


def draining(tp: int, unfinished: Sequence[int]) -> Snapshot:
    """A snapshot of 2 ranks whose sequences have `unfinished` tokens to go. The cache is empty, so none is moved."""
    rows = [tuple(one(1, most) for most in unfinished[start :: 2 // tp]) for start in range(2 // tp)]
    there = frozenset({2})
    return Snapshot(tp=tp, degrees=(1, 2), replicas=tuple(rows), kv_bytes_per_token=0, groups=there)


def steep(tp: int, sequences: int, _: int, __: int) -> float:
    return 0.010 if tp == 1 else 0.005 + 0.002 * sequences


def crossing(step: StepFormula = steep, **changes: Any) -> SwitchController:
    """A controller for which TP 2 is quicker only with few sequences.

    By default TP 1 takes 10 ms a step; TP 2 takes 5 ms, and 2 ms more for each sequence. A switch takes 0.05 s.
    """
    free = [
        SwitchCost(source_tp=a, target_tp=b, reshard_s=0.05, rest_s=0, kv_bytes_per_s=1e9) for a, b in ((1, 2), (2, 1))
    ]
    profile = made_profile(step, switches=tuple(free), group_s={2: 0.2})
    return controller_of(profile, **changes)


SHRINKING = [100, 100, 100, 100, 100, 100, 100, 1000]
"""TP 1 all along: 1000 · 10 ms = 10 s. TP 2 all along: 100 · 21 ms + 900 · 7 ms = 8.4 s. TP 1 until one is left, then
TP 2: 100 · 10 ms + 0.05 s + 900 · 7 ms = 7.35 s."""


def test_without_looking_ahead_it_switches_as_soon_as_that_is_better_than_never() -> None:
    decision = crossing().decide(draining(1, SHRINKING))
    assert decision.switch
    assert of(decision, 2).total_s == pytest.approx(8.45, rel=0.01)


def test_looking_ahead_it_waits_for_the_best_time() -> None:
    asked = crossing(look_ahead=True)
    early = asked.decide(draining(1, SHRINKING))
    assert not early.switch
    stay = of(early, 1)
    assert early.current_s == stay.remaining_s == pytest.approx(10.0)
    assert stay.plan_s == pytest.approx(7.35, rel=0.01)
    assert stay.total_s == pytest.approx(stay.plan_s + 0.05)  # includes the way back to the degree that it began with
    assert [tp for tp, _ in stay.later] == [2]
    assert "TP 1, then TP 2 from" in early.reason
    late = asked.decide(draining(1, SHRINKING[-1:]))
    assert late.switch
    assert late.chosen == 2


def test_looking_ahead_a_stage_begins_with_what_is_best_first() -> None:
    waiting = draining(2, [])
    waiting = msgspec.structs.replace(waiting, waiting=tuple(one(1, most) for most in SHRINKING))
    decision = crossing(look_ahead=True).decide(waiting)
    assert decision.chosen == 1
    assert [tp for tp, _ in of(decision, 1).later] == [2]
    assert not crossing().decide(waiting).switch


def test_where_the_longest_response_ends_first_the_others_are_foreseen() -> None:
    # the first replica ends after 600 steps of 11 ms. Then the second has made 412 of 500 tokens in steps of 16 ms, so
    # a switch at that time is for 88 more steps, and not for none
    replicas = (one(1, 600),), (one(1, 500),) * 6
    snapshot = example(0, 0, replicas=replicas, kv_bytes_per_token=0, groups=frozenset({2}))
    decision = controller_of(made_profile(STEP), look_ahead=True).decide(snapshot)
    stay, away = of(decision, 1), of(decision, 2)
    assert stay.later == ((2, 6),)
    assert stay.plan_s > 600 * 0.011 + 0.12 + 0.5
    assert away.total_s == pytest.approx(500 * 0.013 + 100 * 0.007 + 0.12)
    assert decision.chosen == 2


def quarters(tp: int, sequences: int, _: int, __: int) -> float:
    """The seconds of a step of 8 ranks: the fewer sequences there are in all, the higher is the best degree."""
    return 0.008 / tp + 0.0004 * tp * sequences


EIGHT = (1, 2, 4, 8)


def of_eight(unfinished: Sequence[int], *, move_s: float = 0.02, **changes: Any) -> tuple[SwitchController, Snapshot]:
    """A controller of 8 ranks, whose switches take `move_s`, and its sequences at TP 1."""
    costs = tuple(
        SwitchCost(source_tp=a, target_tp=b, reshard_s=move_s, rest_s=0, kv_bytes_per_s=1e9)
        for a, b in itertools.permutations(EIGHT, 2)
    )
    profile = made_profile(quarters, ranks=8, degrees=EIGHT, switches=costs)
    replicas = tuple(tuple(one(1, most) for most in unfinished[start::8]) for start in range(8))
    snapshot = Snapshot(
        tp=1, degrees=EIGHT, replicas=replicas, kv_bytes_per_token=0, groups=frozenset(EIGHT), home_tp=None
    )
    return controller_of(profile, **({"look_ahead": True} | changes)), snapshot


def test_a_path_of_several_switches_is_foreseen_and_costed_as_a_whole() -> None:
    # 32 sequences. A step takes 9.6 ms at TP 1, 10.4 at TP 2, 14.8 at TP 4, 103.4 at TP 8; of 8: 8.4, 5.6, 8.4, 26.6;
    # of 2: 8.4, 4.8, 3.6, 7.4; of one: 8.4, 4.8, 3.6, 4.2
    asked, snapshot = of_eight([100] * 24 + [400] * 6 + [1600] * 2)
    stay = of(asked.decide(snapshot), 1)
    assert [tp for tp, _ in stay.later] == [2, 4]
    assert [unfinished for _, unfinished in stay.later] == [9, 2], "moments: 8 are left when 9 are not any more"
    parts = 100 * quarters(1, 4, 0, 0) + 300 * quarters(2, 2, 0, 0) + 1200 * quarters(4, 1, 0, 0)
    assert stay.plan_s == pytest.approx(parts + 2 * 0.02)
    assert stay.switches == 3
    assert stay.return_s == pytest.approx(0.02)


def test_a_path_leads_back_where_that_pays() -> None:
    def step(tp: int, sequences: int, _: int, __: int) -> float:
        return {1: 0.010, 2: 0.005 if sequences > 1 else 0.020}[tp]

    asked, begun = crossing(step, look_ahead=True), draining(2, SHRINKING)
    assert [tp for tp, _ in of(asked.decide(begun), 2).later] == [1]
    assert [tp for tp, _ in of(asked.decide(begun), 1).later] == [], "at once to TP 2 is another candidate"


REMAINING = st.lists(st.integers(1, 20).map(lambda tens: 40 * tens), min_size=1, max_size=3, unique=True)


def least_s(replicas: Sequence[Sequence[Work]], tp: int, cost_s: float, may_switch: bool = True) -> float:
    """Seconds of the best of all paths, which may switch whenever a sequence ends: each is simulated to its end."""
    steps = LatencyPredictor(made_profile(quarters, ranks=8, degrees=EIGHT))
    unfinished = sum(map(len, replicas))
    if not unfinished:
        return 0.0
    others = [to for to in EIGHT if to != tp] if may_switch else []
    away = [
        cost_s + least_s(merge(replicas, tp, to, tokens=context).replicas, to, cost_s, may_switch=False)
        for to in others
    ]
    first = drain(steps, tp, replicas, [], slots=8, stops={unfinished - 1} - {0})[0]
    return min([first.seconds + least_s(first.replicas, tp, cost_s), *away])


@given(REMAINING, st.sampled_from([0.0, 0.01, 0.1]))
@settings(max_examples=12, deadline=None)
def test_the_plan_is_the_best_of_all_paths(remaining: list[int], move_s: float) -> None:
    asked, snapshot = of_eight(remaining, move_s=move_s, least_gain=0.0, returns=False)
    decision = asked.decide(snapshot)
    running = [[(1, sequence.most) for sequence in row] for row in snapshot.replicas]
    assert of(decision, decision.chosen).total_s == pytest.approx(least_s(running, 1, move_s), rel=0.06)


def test_sequences_that_one_degree_has_no_cache_for_make_it_slower() -> None:
    asked, snapshot = of_eight([200] * 16, returns=False)
    roomy = asked.decide(snapshot)
    tight = asked.decide(msgspec.structs.replace(snapshot, cache_tokens={1: 250, 2: 500, 4: 1000, 8: 2000}))
    assert of(tight, 1).remaining_s > 1.4 * of(roomy, 1).remaining_s, "one of two on each replica has to wait"
    unlimited = asked.decide(msgspec.structs.replace(snapshot, cache_tokens={tp: 1e9 for tp in EIGHT}))
    assert unlimited == roomy


# the preset of PAT, by its Algorithm 1


def pat(profile: TPProfile) -> SwitchController:
    config = AdaptiveTPConfig(preset="pat")
    return SwitchController(
        profile,
        make_estimate(config.estimate, LengthHistory()),
        max_batch_size=256,
        least_gain=config.least_gain,
        steps_between=config.steps_between,
        look_ahead=config.look_ahead,
        returns=config.returns,
    )


@given(st.lists(st.integers(1, 300), min_size=1, max_size=16), st.sampled_from(EIGHT), st.floats(0, 2))
@settings(deadline=None)
def test_the_preset_decides_line_by_line_as_algorithm_1(remaining: list[int], tp: int, move_s: float) -> None:
    asked, snapshot = of_eight(remaining, move_s=move_s)
    asked = pat(asked._profile)
    rows = merge(snapshot.replicas, 1, tp, tokens=lambda sequence: sequence.context).replicas
    snapshot = msgspec.structs.replace(snapshot, tp=tp, replicas=tuple(map(tuple, rows)), home_tp=1)
    steps = LatencyPredictor(asked._profile)
    running = [[(1, sequence.most) for sequence in row] for row in rows]  # Lmax - Lgen
    current_s = drain_s(steps, tp, running, [], slots=256)  # line 4
    best_s, new = float("inf"), tp  # line 5
    for target in EIGHT:  # line 6
        merged = merge(running, tp, target, tokens=context).replicas  # line 7
        total_s = drain_s(steps, target, merged, [], slots=256)  # line 8
        total_s += move_s if target != tp else 0.0  # line 9
        if total_s < best_s:  # lines 10 to 13
            best_s, new = total_s, target
    decision = asked.decide(snapshot)
    assert decision.current_s == pytest.approx(current_s, rel=0.02)
    assert of(decision, decision.chosen).total_s == pytest.approx(best_s, rel=0.02)
    if decision.chosen != new:  # equal up to what the two simulations differ by
        assert of(decision, new).total_s == pytest.approx(best_s, rel=0.02)
    assert decision.switch == (decision.chosen != tp)  # line 15


def test_the_preset_switches_for_any_gain_and_forgets_the_way_back() -> None:
    # example B with groups: 1.07 s instead of 1.1 s, and 0.12 s for a way back that PAT does not take
    snapshot = example(100, 50, groups=frozenset({2}), home_tp=1)
    decision = pat(made_profile(STEP)).decide(snapshot)
    assert decision.chosen == 2
    assert of(decision, 2).return_s == 0.0
    assert not controller().decide(snapshot).switch


def test_groups_that_a_first_switch_makes_are_there_for_a_later_one() -> None:
    asked = crossing(look_ahead=True)
    missing, there = (
        of(asked.decide(msgspec.structs.replace(draining(1, SHRINKING), groups=groups)), 2)
        for groups in (frozenset[int](), frozenset({2}))
    )
    assert missing.plan_s == there.plan_s


def test_each_batch_begins_with_a_question() -> None:
    asked = controller()
    asked.decide(example(200, 100))
    assert [asked.due(2) for _ in range(2)] == [False, False]
    asked.begin()
    assert [asked.due(2) for _ in range(2)] == [False, True]


def test_over_a_slow_link_the_cache_is_computed_again() -> None:
    slow = tuple(
        SwitchCost(source_tp=source, target_tp=3 - source, reshard_s=0.1, rest_s=0.02, kv_bytes_per_s=1e8)
        for source in (1, 2)
    )
    two = of(controller(switches=slow).decide(example(200, 100)), 2)
    assert two.state == "recompute"
    assert two.move_s == pytest.approx(2.0)
    assert two.switch_s == pytest.approx(0.17 + two.recompute_s)


def test_captured_graphs_are_paid_for() -> None:
    two = of(controller(capture_s={2: 0.5}).decide(example(200, 100)), 2)
    assert two.capture_s == 0.5
    assert two.switch_s == pytest.approx(0.87)


def test_the_first_arrangement_of_a_stage_moves_no_state() -> None:
    # each of TP 1: 100 ms of prefill and 200 · 11 ms; of TP 2: 200 ms of prefill and 200 · 8 ms
    nothing_runs = example(1, 1, replicas=((), ()), waiting=(one(100, 200), one(100, 200)))
    decision = controller().decide(nothing_runs)
    two = of(decision, 2)
    assert (two.state, two.move_s, two.recompute_s, two.batch_sizes) == ("none", 0.0, 0.0, (0,))
    assert decision.current_s == pytest.approx(2.3)
    assert two.remaining_s == pytest.approx(1.8)
    assert two.switch_s == pytest.approx(0.17)
    assert decision.chosen == 2


def test_a_large_batch_that_waits_stays_spread_out() -> None:
    step = flat({1: 0.010, 2: 0.010})
    snapshot = example(1, 1, replicas=((), ()), waiting=(one(16, 100),) * 16)
    decision = controller_of(made_profile(step)).decide(snapshot)
    assert decision.chosen == 1


def test_degrees_that_are_ruled_out_or_not_profiled_are_no_candidates() -> None:
    snapshot = example(200, 100, degrees=(1, 2, 4), ruled_out={2: "its cache would be too small"})
    decision = controller().decide(snapshot)
    assert [candidate.tp for candidate in decision.candidates] == [1]
    assert decision.ruled_out == {2: "its cache would be too small", 4: "not in the profile"}
    assert not decision.switch
    assert decision.reason == "no degree but TP 1 is possible"


def test_where_nothing_is_unfinished_nothing_changes() -> None:
    decision = controller().decide(example(1, 1, replicas=((), ())))
    assert (decision.switch, decision.current_s, decision.reason) == (False, 0.0, "nothing is unfinished")


def test_a_decision_goes_into_the_event_log_and_back() -> None:
    decision = controller().decide(example(200, 100, ruled_out={4: "no"}))
    assert msgspec.json.decode(msgspec.json.encode(decision), type=Decision) == decision
    assert msgspec.to_builtins(decision, str_keys=True)["ruled_out"] == {"4": "no"}


def test_an_engine_that_the_profile_is_not_of_is_refused() -> None:
    with pytest.raises(ConfigError, match="TP 4 is not in the profile, which has 1, 2; profile it, too"):
        controller().decide(example(1, 1, tp=4, replicas=((),)))
    with pytest.raises(ConfigError, match="the profile is of 2 ranks, not 4; profile these"):
        controller().decide(example(1, 1, tp=2, replicas=((), ())))


def test_shorter_expectations_make_a_switch_not_worth_it() -> None:
    lengths = LengthHistory()
    lengths.add(40)
    profile = made_profile(STEP)
    decision = controller_of(profile, Survival(lengths)).decide(example(200, 100))
    assert (decision.estimate, decision.switch) == ("survival", False)
    assert decision.current_s == pytest.approx(40 * 0.011)


def test_of_equal_sequences_not_all_of_one_replica_end_first() -> None:
    lengths = LengthHistory()
    for tokens in (10, 20, 30, 40):
        lengths.add(tokens)
    snapshot = example(1, 1, replicas=((one(16, 90),) * 2, (one(16, 90),) * 2))
    decision = controller_of(made_profile(STEP), Survival(lengths)).decide(snapshot)
    # 10 and 30 on one replica, 20 and 40 on the other, which is the last: 20 · 12 ms + 20 · 11 ms
    assert decision.current_s == pytest.approx(0.46)


def test_a_ranking_decides_by_what_it_expects() -> None:
    long = Unfinished(context=200, generated=0, most=9000, expected=200)
    short = Unfinished(context=100, generated=0, most=9000, expected=100)
    snapshot = example(1, 1, replicas=((long,), (short,)))
    decision = controller_of(made_profile(STEP), Ranked()).decide(snapshot)
    assert decision.current_s == pytest.approx(2.2)


# the times at which to decide


def test_it_is_due_at_first_and_when_an_eighth_has_gone_or_come() -> None:
    asked = controller()
    assert not asked.due(0)
    assert [asked.due(16) for _ in range(2)] == [False, True]
    row = (one(16, 50),) * 8
    asked.decide(example(1, 1, replicas=(row, row)))
    assert [asked.due(unfinished) for unfinished in (16, 15, 17, 17, 14)] == [False, False, False, False, True]
    assert not asked.due(0)


def test_a_batch_that_comes_in_parts_is_judged_when_all_of_it_is_there() -> None:
    asked = controller()
    assert [asked.due(unfinished) for unfinished in (8, 16, 32, 64, 64)] == [False, False, False, False, True]
    asked.decide(example(1, 1, replicas=((one(16, 50),) * 32, (one(16, 50),) * 32)))
    assert [asked.due(unfinished) for unfinished in (80, 96, 96)] == [False, False, True]


def test_it_is_due_after_some_steps_though_nothing_ends() -> None:
    asked = controller_of(made_profile(STEP), steps_between=3)
    asked.due(2)
    asked.decide(example(100, 50))
    for number in range(1, 7):  # of two replicas in turn
        assert not asked.due(2)
        asked.observe(DecodedStep(1, 1, 200, 2, 0.011))
        assert asked.due(2) == (number == 6)
    asked.decide(example(100, 50))
    assert not asked.due(2)


# measurements


def test_measured_steps_stretch_what_is_predicted_but_not_the_base() -> None:
    slow = controller()
    for _ in range(300):
        slow.observe(DecodedStep(1, 1, 100, 2, 0.022))
    decision = slow.decide(example(100, 100))
    assert decision.current_s == pytest.approx(2.2, rel=0.01)  # both replicas to the end, at 22 ms instead of 11
    assert of(decision, 2).remaining_s > 1.6 * 0.8  # the whole machine is taken to be slower
    assert slow.predictor.base.step_s(1, 1, 100, 2) == pytest.approx(0.011)


def test_switches_that_take_longer_than_profiled_are_expected_to_do_so_again() -> None:
    surprised, snapshot = controller(), example(200, 100, kv_bytes_per_token=0)
    before = of(surprised.decide(snapshot), 2)
    for _ in range(20):
        surprised.observe_switch(of(surprised.decide(snapshot), 2).switch_s - before.groups_s, 3 * 0.12)
    after_all = of(surprised.decide(snapshot), 2)
    assert [after_all.reshard_s, after_all.rest_s] == pytest.approx([0.3, 0.06], rel=1e-4)
    assert (after_all.groups_s, after_all.recompute_s) == (before.groups_s, before.recompute_s)


# no flapping


def after(snapshot: Snapshot, decision: Decision) -> Snapshot:
    merged = merge(snapshot.replicas, snapshot.tp, decision.chosen, tokens=lambda sequence: sequence.context)
    return msgspec.structs.replace(
        snapshot,
        tp=decision.chosen,
        replicas=tuple(tuple(running) for running in merged.replicas),
        groups=snapshot.groups | {decision.chosen},
    )


def test_after_a_switch_the_same_sequences_are_no_reason_to_switch_back() -> None:
    decided = controller()
    snapshot = example(200, 100)
    switched = after(snapshot, decided.decide(snapshot))
    assert switched.tp == 2
    assert not decided.due(switched.unfinished)
    assert not decided.decide(switched).switch


@given(
    st.lists(st.builds(one, st.integers(1, 250), st.integers(1, 400)), min_size=1, max_size=12),
    st.sampled_from([1, 4]),
    st.floats(0.001, 0.03),
    st.floats(0.001, 0.03),
    st.floats(0, 0.01),
    st.booleans(),
    st.sampled_from([None, 1, 4]),
)
def test_no_batch_switches_there_and_back(
    sequences: list[Unfinished],
    tp: int,
    one_s: float,
    four_s: float,
    a_sequence_s: float,
    look_ahead: bool,
    home_tp: int | None,
) -> None:
    profile = made_profile(flat({1: one_s, 4: four_s}, a_sequence_s), ranks=4, degrees=(1, 4))
    decided = controller_of(profile, max_batch_size=16, least_gain=0.0, look_ahead=look_ahead)
    snapshot = example(
        1, 1, tp=4, replicas=(tuple(sequences),), degrees=(1, 4), kv_bytes_per_token=1000, groups=frozenset({4})
    )
    if tp == 1:
        snapshot = after(
            snapshot,
            Decision(
                tp=4,
                unfinished=1,
                current_s=0,
                candidates=(),
                ruled_out={},
                chosen=1,
                switch=True,
                estimate="",
                reason="",
            ),
        )
    snapshot = msgspec.structs.replace(snapshot, home_tp=home_tp)
    decision = decided.decide(snapshot)
    if decision.switch:
        switched = after(snapshot, decision)
        switched = msgspec.structs.replace(switched, home_tp=home_tp or decision.chosen)
        assert not decided.decide(switched).switch


ROWS = st.lists(
    st.lists(st.builds(one, st.integers(1, 250), st.integers(1, 400)), max_size=5), min_size=12, max_size=12
)


@given(ROWS, st.sampled_from([1, 2, 3, 4, 6, 12]), st.integers(1, 8))
def test_totals_are_the_sums_of_their_parts_and_the_least_is_chosen(
    rows: list[list[Unfinished]], tp: int, max_batch_size: int
) -> None:
    degrees = (1, 2, 3, 4, 6, 12)
    profile = made_profile(flat({d: 0.01 / d + 0.001 * d for d in degrees}), ranks=12, degrees=degrees)
    snapshot = example(1, 1, tp=tp, degrees=degrees, replicas=tuple(map(tuple, rows[: 12 // tp])))
    decision = controller_of(profile, max_batch_size=max_batch_size).decide(snapshot)
    assert [candidate.tp for candidate in decision.candidates] == list(degrees)
    for c in decision.candidates:
        state = {"move": c.move_s, "recompute": c.recompute_s, "none": 0.0}[c.state]
        assert c.switch_s == pytest.approx(c.groups_s + c.reshard_s + c.rest_s + c.capture_s + state)
        assert c.total_s == pytest.approx(c.remaining_s + c.switch_s)
        assert sum(c.batch_sizes) == sum(map(len, snapshot.replicas))
        assert len(c.batch_sizes) == 12 // c.tp
    assert of(decision, tp).switch_s == 0.0
    assert of(decision, tp).total_s == decision.current_s
    assert decision.switch == (decision.chosen != tp)
    if decision.switch:
        assert of(decision, decision.chosen).total_s == min(c.total_s for c in decision.candidates)


# merging replicas


def tokens(sequence: int) -> int:
    return sequence


def merged(replicas: Sequence[Sequence[int]], tp: int, target: int) -> list[list[int]]:
    return merge(replicas, tp, target, tokens=tokens).replicas


def test_replicas_that_become_one_keep_theirs() -> None:
    assert merged([[5, 1], [2], [7, 8], [9]], 1, 2) == [[5, 1, 2], [7, 8, 9]]
    assert merged([[5, 1], [2], [], [9]], 1, 4) == [[5, 1, 2, 9]]


def test_a_replica_that_is_split_is_dealt_out_evenly_in_number_and_then_in_tokens() -> None:
    # 9 | 5, then 4 to the lighter and 3 to the other, then 1 to the lighter
    assert merged([[1, 9, 3, 5, 4]], 2, 1) == [[9, 3], [5, 4, 1]]


def test_sequences_that_their_ranks_have_too_many_of_go_to_others_the_smallest_first() -> None:
    found = merge([[5, 1], [2, 4], [], [9]], 1, 2, tokens=tokens)
    assert found.replicas == [[5, 2, 4], [9, 1]]
    assert found.across == [[1], [], [], []]


def test_sequences_are_shared_out_over_all_replicas() -> None:
    rows = [[9] * 5, [9] * 4, [9] * 3, [], [], [], [], []]
    assert list(map(len, merged(rows, 1, 2))) == [3, 3, 3, 3]
    assert list(map(len, merged(rows, 1, 4))) == [6, 6]
    assert list(map(len, merged([[9] * 7, []], 4, 1))) == [1, 1, 1, 1, 1, 1, 1, 0]


def test_degrees_that_do_not_divide_each_other_exchange_among_their_common_multiple() -> None:
    assert merge([[6], [5, 4], [3]], 2, 3, tokens=tokens) == ([[6, 3], [5, 4]], [[], [], []])


def test_the_same_degree_changes_nothing() -> None:
    assert merged([[1, 9, 3], [5]], 2, 2) == [[1, 9, 3], [5]]


@given(
    st.lists(st.lists(st.integers(1, 1000), max_size=6), min_size=12, max_size=12),
    st.sampled_from([1, 2, 3, 4, 6, 12]),
    st.sampled_from([1, 2, 3, 4, 6, 12]),
)
def test_merging_loses_nothing_is_even_and_moves_no_more_than_that_takes(
    rows: list[list[int]], tp: int, target: int
) -> None:
    numbered = [
        [(index, place, value) for place, value in enumerate(row)] for index, row in enumerate(rows[: 12 // tp])
    ]
    found, across = merge(numbered, tp, target, tokens=lambda item: item[2])
    assert len(found) == 12 // target
    assert sorted(item for row in found for item in row) == [item for row in numbered for item in row]
    if tp == target:
        return
    sizes = [len(row) for row in found]
    assert max(sizes) - min(sizes) <= 1
    exchange = lcm(tp, target)
    left = {item for row in across for item in row}
    for index, row in enumerate(found):
        assert all((item in left) == (item[0] * tp // exchange != index * target // exchange) for item in row)
    groups = [sum(map(len, numbered[first : first + exchange // tp])) for first in range(0, 12 // tp, exchange // tp)]
    parts, least, more = exchange // target, sum(sizes) // len(sizes), sum(sizes) % len(sizes)
    surplus = sum(max(0, count - parts * (least + (more > 0))) for count in groups)
    lacking = sum(max(0, parts * least - count) for count in groups)
    assert len(left) == max(surplus, lacking) or parts > 1


@pytest.mark.parametrize(("cached", "tp", "expected"), [([[100, 50], [120]], 1, 1500), ([[100]], 2, 500), ([[]], 2, 0)])
def test_the_rank_with_the_most_to_send_counts(cached: Sequence[Sequence[int]], tp: int, expected: float) -> None:
    assert sent_bytes(cached, tp, 10) == expected


# prompts that a group shares


def sample(group: int, context: int, most: int, shared: int = 96) -> Unfinished:
    return Unfinished(context=context, generated=context - 100, most=most, group=group, shared=shared)


def test_the_sequence_of_a_group_that_ends_last_counts_the_prompt_of_all() -> None:
    row = [sample(0, 150, 10), sample(0, 160, 30), sample(1, 170, 20), sample(0, 180, 20)]
    assert counted_once(row, [s.most for s in row]) == [150 - 96, 160, 170, 180 - 96]
    assert counted_once([one(150, 10), one(160, 30)], [10, 30]) == [150, 160]


def test_a_group_whose_prompt_is_shared_fits_where_its_contexts_would_not() -> None:
    # 8 responses of a prompt of 960 tokens have 40 tokens each, and 50 to go: 1,680 tokens in the end
    group = tuple(Unfinished(context=1000, generated=40, most=50, group=0, shared=960) for _ in range(8))
    snapshot = example(0, 0, replicas=(group, ()), cache_tokens={1: 1680, 2: 2000}, groups=frozenset({2}))
    decision = controller_of(made_profile(STEP), look_ahead=True).decide(snapshot)
    assert of(decision, 1).remaining_s == pytest.approx(50 * 0.018)
    assert of(decision, 2).remaining_s == pytest.approx(50 * 0.014)
    waiting = msgspec.structs.replace(snapshot, replicas=((), ()), waiting=group)
    # the prompt is computed once, and what is of each response
    computed_s = of(controller_of(made_profile(STEP)).decide(waiting), 2).remaining_s - 50 * 0.014
    assert computed_s == pytest.approx(960e-3 + 8 * 40e-3)


def test_a_shared_prompt_is_sent_and_computed_again_once() -> None:
    # 200 tokens of two replicas, of which 96 are a prompt of both sequences of each
    row = (sample(0, 150, 300), sample(0, 146, 200))
    other = (sample(1, 150, 300), sample(1, 146, 200))
    shared = of(controller().decide(example(1, 1, replicas=(row, other))), 2)
    alone = tuple(tuple(msgspec.structs.replace(s, shared=0) for s in own) for own in (row, other))
    apart = of(controller().decide(example(1, 1, replicas=alone)), 2)
    assert (apart.move_s, shared.move_s) == pytest.approx((0.296, 0.200))
    assert shared.recompute_s == pytest.approx(0.4), "1 ms for each of twice 150 and twice 50 tokens"
    assert shared.recompute_s < apart.recompute_s
    assert shared.remaining_s == apart.remaining_s, "attention reads the prompt for each"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(100, 200), st.integers(1, 50)), max_size=12))
def test_the_tokens_that_are_left_at_each_moment_count_every_prompt_once(rows: list[tuple[int, int, int]]) -> None:
    row = [sample(*figures) for figures in rows]
    remaining = [s.most for s in row]
    held = list(zip(((s.context, s.most) for s in row), counted_once(row, remaining), strict=True))
    in_order = InOrder.of(held)
    ends = sorted(remaining)
    for place, start in enumerate([0, *ends[:-1]] if ends else []):
        if place and ends[place] == ends[place - 1]:
            continue  # several end at once: what is left in between is never seen
        left = [s for s in row if s.most > start]
        prompts = 96 * len({s.group for s in left})
        assert in_order.tokens_N[place] == sum(s.context - 96 + start for s in left) + prompts
