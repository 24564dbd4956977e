"""What was expected is compared with what came, and placement that does not pay is given up, once and not for ever."""

import asyncio
import re
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tailrace.config.rollout import DispatchConfig
from tailrace.events import Event, EventLog
from tailrace.planning.dispatch.balanced import Balanced
from tailrace.planning.dispatch.base import EngineState, Policy
from tailrace.planning.dispatch.costs import StepCosts
from tailrace.planning.dispatch.simple import Pull, Random, RoundRobin
from tailrace.planning.lengths.base import Asked, Expectation
from tailrace.planning.lengths.history import History, Siblings
from tailrace.planning.lengths.oracle import Oracle
from tailrace.planning.remaining import LengthHistory
from tailrace.registers.events import EventKind
from tailrace.registers.metrics import METRICS
from tailrace.rollout.foresight import Foresight
from tailrace.types import FinishReason, Sample
from tests.transfer.virtual_time import virtual_time

COSTS = StepCosts(base=0.01, each=0.01, context=1e-6, prefill=1e-5)
"""Steps whose time is mostly that of their sequences: where work is shared out badly, it takes longer."""


def make_foresight(
    events: list[Event],
    *,
    lengths: Any = Oracle,
    per_step: int = 8,
    least_gain: float = 0.02,
    limit_s: float = 60,
    policy: Policy | None = None,
    max_staleness: int = 0,
) -> Foresight:
    config = DispatchConfig(policy="skewness_aware", check_every=1, least_gain=least_gain, limit_s=limit_s)
    log = EventLog(sinks=(events.append,))
    return Foresight(
        lengths(),
        policy or Balanced(),
        config,
        LengthHistory(),
        log,
        samples_per_step=per_step,
        max_staleness=max_staleness,
    )


def engines(count: int, *, slots: int = 2, times: StepCosts = COSTS) -> list[EngineState]:
    return [EngineState(name=str(number), times=times, slots=slots, cache_tokens=10**6) for number in range(count)]


def asked(number: int, tokens: int | None = None) -> Asked:
    return Asked(prompt_id=str(number), prompt_tokens=5, forced=tokens)


def sample(group: int, tokens: int) -> Sample:
    return Sample(
        request_id=0,
        group_id=group,
        response_ids=np.zeros(tokens, np.int64),
        rollout_log_probs=np.zeros(tokens, np.float32),
        weight_versions=np.zeros(tokens, np.int64),
        finish_reason=FinishReason.STOP,
    )


def registered(kind: EventKind) -> set[str]:
    return {metric.name for metric in METRICS if kind in metric.of}


async def play(
    foresight: Foresight, step: int, lengths: Sequence[int], states: Sequence[EngineState], told: Sequence[int]
) -> None:
    """A step of groups of one, of these lengths, of which `told` was expected."""
    for number, tokens in enumerate(lengths):
        prompt = asked(number, told[number])
        (expected,) = foresight.expect([prompt])
        ended = foresight.ended(step, prompt, expected, sample(number, tokens))
        assert (ended is not None) == (number == len(lengths) - 1)
        if ended is not None:
            await foresight.check(step, ended, states)


SKEWED = [200, 200] + [20] * 30
"""The long ones are best by themselves, in a small batch."""
EVEN = [50] * 32


@virtual_time
async def test_placement_that_does_not_pay_is_given_up_once_and_tried_again() -> None:
    events: list[Event] = []
    foresight = make_foresight(events, per_step=32)
    for step, lengths in enumerate([SKEWED, EVEN, EVEN, SKEWED, SKEWED]):
        await play(foresight, step, lengths, engines(2, slots=64), lengths)
    checks = [event for event in events if event.task == "dispatch"]
    assert [event.metrics["placed"] for event in checks] == [1, 1, 0, 0, 1]
    gains = [event.metrics["placement_gain"] for event in checks]
    assert gains[0] == gains[3] == gains[4] > 0.05
    assert gains[1] == gains[2] == pytest.approx(0, abs=0.01)
    told = [event for event in events if event.task == "dispatch_change"]
    assert [event.metrics for event in told] == [{"placed": 0}, {"placed": 1}]
    changes = [event.info["text"] for event in told]
    assert len(changes) == 2
    assert changes[0].startswith("prompts are pulled from now on: placing them by the lengths of oracle")
    assert "below rollout.dispatch.least_gain (2.0 %)" in changes[0]
    assert changes[1].startswith("prompts are placed by the lengths of oracle again")


@virtual_time
async def test_wrong_expectations_lose_where_right_ones_gain() -> None:
    events: list[Event] = []
    foresight = make_foresight(events, per_step=32, least_gain=0.0)
    wrong = list(reversed(SKEWED))
    await play(foresight, 0, SKEWED, engines(2, slots=64), SKEWED)
    await play(foresight, 1, SKEWED, engines(2, slots=64), wrong)
    right, lost = (event.metrics for event in events if event.task == "dispatch")
    assert right["placement_gain"] > lost["placement_gain"]
    assert right["expected_tau"] == pytest.approx(1)
    assert lost["expected_tau"] < 0
    assert right["expected_inside"] == 1
    named = {re.sub(r"_\d+$", "_<percent>", name) for name in right}
    assert named == registered(EventKind.DISPATCH) - {"recall_ceiling_<percent>"}, "groups of one have no others"


@virtual_time
async def test_where_slots_are_few_the_order_gains_and_placement_nothing_more() -> None:
    events: list[Event] = []
    late = [10] * 31 + [200]
    foresight = make_foresight(events, per_step=32)
    batches_are_free = StepCosts(base=0.01, each=0.0, context=0.0, prefill=0.0)
    await play(foresight, 0, late, engines(2, times=batches_are_free), late)
    metrics = events[0].metrics
    assert metrics["order_gain"] > 0.2
    assert metrics["placement_gain"] < 0.02
    assert not foresight.pays


@virtual_time
@pytest.mark.parametrize("policy", [Pull(), RoundRobin(), Random(seed=0)])
async def test_a_policy_that_knows_no_lengths_is_neither_weighed_nor_given_up(policy: Policy) -> None:
    events: list[Event] = []
    foresight = make_foresight(events, per_step=32, policy=policy)
    await play(foresight, 0, SKEWED, engines(2, slots=4), SKEWED)
    (check,) = events
    assert {"order_gain", "pull_s", "ordered_s"} < check.metrics.keys()
    assert not {"placement_gain", "placed_s"} & check.metrics.keys()
    assert check.metrics["placed"] == 0
    assert foresight.policy is policy


@virtual_time
async def test_without_measured_steps_no_gain_is_told_and_nothing_changes() -> None:
    events: list[Event] = []
    foresight = make_foresight(events)
    await play(foresight, 0, [50] * 8, [], [50] * 8)
    (check,) = events
    assert "placement_gain" not in check.metrics
    assert foresight.pays


@virtual_time
async def test_lengths_are_learned_from_what_has_finished() -> None:
    foresight = make_foresight([], lengths=History, per_step=16)
    lengths = [10, 1000] * 8
    for step in range(2):
        for number, tokens in enumerate(lengths):
            prompt = asked(number % 2)
            foresight.ended(step, prompt, Expectation(1, 1, 1), sample(number, tokens))
    short, long = foresight.expect([asked(0), asked(1)])
    assert short.tokens < 30 < 300 < long.tokens


@virtual_time
async def test_a_step_that_the_next_one_overtakes_is_checked_as_well() -> None:
    foresight = make_foresight([], lengths=History, per_step=2, max_staleness=1)

    def end(step: int, number: int) -> bool:
        return foresight.ended(step, asked(number), Expectation(1, 1, 1), sample(number, 10)) is not None

    assert [end(0, 0), end(1, 0), end(1, 1), end(0, 1)] == [False, False, True, True]
    assert [end(2, 0), end(4, 0), end(4, 1), end(2, 1)] == [False, False, True, False], "two steps later it is given up"


class Slow(History):
    """Waits until it is let go, or raises an error."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.asked = 0
        self.error: Exception | None = None

    def prepare(self, prompts: Sequence[Asked]) -> None:
        self.asked += 1
        assert self.go_on.wait(60)
        if self.error is not None:
            raise self.error


async def test_a_predictor_that_is_slower_than_its_limit_is_spared_until_the_next_check() -> None:
    events: list[Event] = []
    foresight = make_foresight(events, lengths=Slow, limit_s=0.01)
    slow: Any = foresight._predictor
    await foresight.prepare([asked(0)])
    await foresight.prepare([asked(0)])
    assert slow.asked == 1
    assert not foresight.pays
    (change,) = events
    assert change.info["text"] == (
        "prompts are pulled until a check finds that placing them pays: the lengths of history take longer than "
        "rollout.dispatch.limit_s (0.01 s)"
    )
    await play(foresight, 0, [50] * 8, engines(2), [50] * 8)
    assert not foresight.pays, "what was not prepared says nothing of what it gains"
    waiting = asyncio.create_task(foresight.prepare([asked(0)]))
    await asyncio.sleep(0)
    slow.go_on.set()
    await waiting
    assert slow.asked in (1, 2), "the late work took the whole limit, or left some of it"


async def test_claims_of_one_step_are_prepared_one_after_the_other_and_wait_no_longer_than_one_limit() -> None:
    events: list[Event] = []
    foresight = make_foresight(events, lengths=Slow)
    slow: Any = foresight._predictor
    claims = [asyncio.create_task(foresight.prepare([asked(number)])) for number in range(4)]
    await asyncio.sleep(0)
    claims[0].cancel()
    slow.go_on.set()
    await asyncio.wait(claims)
    assert slow.asked == 4, "also those behind a claim that ended"
    assert events == []


@pytest.mark.parametrize("error", [np.linalg.LinAlgError("it broke"), IndexError("it broke"), Exception("it broke")])
async def test_a_predictor_that_fails_ends_nothing(error: Exception) -> None:
    events: list[Event] = []
    foresight = make_foresight(events, lengths=Slow)
    slow: Any = foresight._predictor
    slow.go_on.set()
    slow.error = error
    await foresight.prepare([asked(0)])
    assert events[0].info["text"].endswith("the lengths of history cannot be had (it broke)")
    assert not foresight.pays
    await play(foresight, 0, [50] * 8, engines(2), [50] * 8)
    await foresight.prepare([asked(0)])
    assert slow.asked == 2, "tried again after the check"
    assert [event.task for event in events] == ["dispatch_change", "dispatch"], "and what is known is not told again"
    slow.error = None
    await play(foresight, 1, SKEWED[:8], engines(2), SKEWED[:8])
    await foresight.prepare([asked(0)])
    assert slow.asked == 3


def test_a_scout_is_wanted_of_prompts_without_a_past_where_it_helps() -> None:
    foresight = make_foresight([], lengths=Siblings)
    assert foresight.wants_scout(asked(0))
    foresight.ended(0, asked(0), Expectation(1, 1, 1), sample(0, 10))
    assert not foresight.wants_scout(asked(0))
    assert foresight.wants_scout(asked(1))
    foresight.pays = False
    assert not foresight.wants_scout(asked(1))
    assert not make_foresight([], lengths=History).wants_scout(asked(0))
