"""Claims on simulated engines that change their TP degree."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.config.engine import AdaptiveTPConfig
from tailrace.events import Event
from tailrace.planning.step_times.operators import Pass
from tailrace.registers.events import EventKind
from tailrace.simulator.scenario import EngineKind, Rearranging, Scenario
from tests.planning.tp_profiles import flat, made_profile
from tests.simulator.test_run import SCENARIOS, SMALL, check_conservation, lengths, played, replays

STEP_S = {1: 0.010, 2: 0.006}


@dataclass(frozen=True)
class ByDegree:
    """Steps of 10 ms at TP 1 and 6 ms at TP 2, a millisecond more for each sequence and each token of prompts."""

    def step_s(
        self, tp: int, batch_size: float, context_tokens: float, replicas: int, others: float | None = None
    ) -> float:
        return STEP_S[tp] + 1e-3 * batch_size

    def prefill_s(self, tp: int, batch_size: float, rms_length: float) -> float:
        return STEP_S[tp] + 1e-3 * batch_size * rms_length

    def mixed_s(self, tp: int, batch_size: float, context_tokens: float, chunk: Pass) -> float:
        return STEP_S[tp] + 1e-3 * batch_size + 1e-3 * chunk.tokens


def adaptive(**settings: Any) -> Rearranging:
    config = AdaptiveTPConfig(**({"estimate": "bound"} | settings))
    return Rearranging(
        config=config,
        profile=made_profile(flat(STEP_S)),
        cache_tokens={1: 1e6, 2: 2e6},
        kv_bytes_per_token=100_000,
        limit=400,
    )


ENGINE = EngineKind(times=ByDegree(), tp=1, dp=2, slots=8, cache_tokens=1e6, block=1, adaptive_tp=adaptive())
TAIL = replace(SMALL, steps=1, groups_per_step=16, engines=(ENGINE,))
DRAINING = lengths(*[[20]] * 7, [400], *[[20]] * 7, [400], prompt=1)
"""A batch that fills both replicas of TP 1, and then two long responses."""


def decisions(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event.task == EventKind.ADAPTIVE_TP]


def test_tp_rises_as_the_batch_drains_and_returns_at_the_end_of_the_stage() -> None:
    run, events = played(TAIL, DRAINING)
    told = decisions(events)
    changes = [(event.metrics["source_tp"], event.metrics["target_tp"]) for event in told]
    assert [change for change in changes if change[0] != change[1]] == [(1, 2), (2, 1)]
    switch, back = (event for event in told if event.metrics["source_tp"] != event.metrics["target_tp"])
    assert 2 <= switch.metrics["unfinished"] < 16
    assert "decision" not in back.info
    static, _ = played(replace(TAIL, engines=(replace(ENGINE, adaptive_tp=None),)), DRAINING)
    assert run.agenda.now < static.agenda.now


def test_a_switch_takes_what_the_decision_says_that_it_costs() -> None:
    """Weights 0.1 s, the rest 0.02 s, groups 0.05 s, and keys and values at 1 GB a second."""
    _, events = played(TAIL, DRAINING)
    switch = next(event for event in decisions(events) if "report" in event.info)
    report, metrics = switch.info["report"], switch.metrics
    assert (report["groups_s"], report["weights_s"], report["made_groups"]) == (0.05, 0.1, (2,))
    assert report["rest_s"] == pytest.approx(0.02)
    assert report["kv_s"] == pytest.approx(report["kv_bytes"] / 1e9)
    assert report["kv_bytes"] > 0
    assert metrics["switch_s"] == metrics["predicted_s"] == pytest.approx(0.17 + report["kv_s"])
    assert switch.end - switch.start == pytest.approx(metrics["switch_s"] + metrics["waited_s"])


def test_degrees_that_are_left_out_are_not_chosen() -> None:
    stays = replace(ENGINE, adaptive_tp=adaptive(degrees=(1,)))
    _, events = played(replace(TAIL, engines=(stays,)), DRAINING)
    assert all(event.metrics["target_tp"] == 1 for event in decisions(events))


def test_weights_wait_for_a_switch_and_a_switch_for_weights() -> None:
    ahead = replace(TAIL, steps=3, max_staleness=1, weights="in_flight")
    engine = replace(ENGINE, install_s=0.3, arrive_s=0.1)
    _, events = played(replace(ahead, engines=(engine,)), lengths(*DRAINING_GROUPS * 3, prompt=1))
    spans = sorted(
        (event.start + event.metrics["waited_s"], event.end)
        if event.task == EventKind.ADAPTIVE_TP
        else (event.start, event.end)
        for event in events
        if event.task == EventKind.UPDATE_WEIGHTS or "report" in event.info
    )
    assert len(spans) > 4
    assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(spans))


DRAINING_GROUPS = [[script.tokens for script in group] for group in DRAINING.groups]


@given(SCENARIOS, st.booleans(), st.integers(1, 64), st.data())
@settings(max_examples=100, deadline=None)
def test_whatever_the_degree_every_sample_is_trained_on_once(
    scenario: Scenario, look_ahead: bool, steps_between: int, data: st.DataObject
) -> None:
    setup = adaptive(look_ahead=look_ahead, steps_between=steps_between, least_gain=0.0)
    profile = made_profile(flat(STEP_S), group_s={2: 0.0})
    setup = replace(setup, profile=profile, cache_tokens={1: 100, 2: 200}, kv_bytes_per_token=1000, limit=40)
    tp = data.draw(st.sampled_from([1, 2]))
    engines = tuple(
        replace(kind, times=ByDegree(), tp=tp, dp=2 // tp, cache_tokens=100.0 * tp, adaptive_tp=setup)
        for kind in scenario.engines
    )
    scenario = replace(scenario, engines=engines)
    check_conservation(scenario, data.draw(replays(scenario)))
