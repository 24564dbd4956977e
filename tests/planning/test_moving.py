"""Moves of running responses pay by the prediction that they were chosen by."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.planning.dispatch.base import Degree, EngineState
from tailrace.planning.dispatch.moving import MOST_BYTES, LinkEnd, Move, ObservedLink, moves, recompute_s, transfer_s
from tailrace.planning.dispatch.seconds import engine_s
from tailrace.planning.drain import Work
from tailrace.types import CacheForm
from tests.planning.test_dispatch import Linear

works = st.lists(st.tuples(st.integers(1, 500), st.integers(1, 300)), max_size=12)


def engines(*running: Sequence[Work], times: Linear | None = None, slots: int = 16) -> list[EngineState]:
    chosen = times or Linear(base=1, each=0.5, prefill=0.01)
    return [
        EngineState(name=str(number), times=chosen, slots=slots, cache_tokens=10**6, running=list(each))
        for number, each in enumerate(running)
    ]


def moved(before: Sequence[EngineState], chosen: Sequence[Move]) -> list[EngineState]:
    after = [list(engine.running) for engine in before]
    for move in chosen:
        after[move.target].append(before[move.source].running[move.sequence])
        after[move.source].remove(before[move.source].running[move.sequence])
    return [replace(engine, running=running) for engine, running in zip(before, after, strict=True)]


@given(st.lists(works, min_size=2, max_size=4), st.floats(0.0, 0.3))
def test_moves_gain_what_they_say_and_lose_no_response(given: list[list[Work]], least_gain: float) -> None:
    before = engines(*given)
    chosen = moves(before, {"recompute": recompute_s(before)}, least_gain=least_gain)
    assert len({(move.source, move.sequence) for move in chosen}) == len(chosen), "each moves once"
    after = moved(before, chosen)
    stood = [sum(move.seconds for move in chosen if move.target == index) for index in range(len(before))]
    seconds = max(engine_s(engine, []) + still for engine, still in zip(after, stood, strict=True))
    latest = max(engine_s(engine, []) for engine in before)
    assert seconds == pytest.approx(latest - sum(move.gain_s for move in chosen))
    assert all(move.gain_s >= 0 for move in chosen)


def test_a_dry_engine_takes_over_until_both_are_done_at_the_same_time() -> None:
    before = engines([(50, 100)] * 8, [])
    chosen = moves(before, {"recompute": recompute_s(before)}, least_gain=0.0)
    assert 3 <= len(chosen) <= 4
    assert all((move.source, move.target) == (0, 1) for move in chosen)
    assert chosen[0].seconds == pytest.approx(0.5), "50 tokens are computed again"


def test_what_takes_longer_to_move_than_to_finish_stays() -> None:
    before = engines([(100_000, 20), (100_000, 10)], [])
    assert moves(before, {"recompute": recompute_s(before)}) == []


def test_an_engine_without_room_gets_none() -> None:
    before = engines([(10, 500)] * 3, [(10, 1)] * 2, slots=2)
    assert moves(before, {"recompute": recompute_s(before)}) == []


def test_an_engine_that_becomes_faster_by_itself_keeps_what_it_has() -> None:
    slow, dry = engines([(50, 100)] * 4, [], times=Linear(base=1, each=0.5, prefill=1))
    assert moves([slow, dry], {"recompute": recompute_s([slow, dry])})
    quick = Degree(times=Linear(base=0.2, each=0.1), tp=2, replicas=1, slots=16, cache_tokens=10**6, switch_s=5.0)
    adaptive = replace(slow, degrees=[quick])
    assert moves([adaptive, dry], {"recompute": recompute_s([adaptive, dry])}) == []
    hardly = replace(slow, degrees=[replace(quick, switch_s=1000.0)])
    assert moves([hardly, dry], {"recompute": recompute_s([hardly, dry])}) == moves(
        [slow, dry], {"recompute": recompute_s([slow, dry])}
    )


def test_the_number_of_moves_is_bounded() -> None:
    before = engines([(10, 500)] * 14, [])
    assert len(moves(before, {"recompute": recompute_s(before)}, least_gain=0.0, most=2)) == 2


FORM = CacheForm(name="model", token_bytes=1000)


def test_the_cheaper_way_is_taken() -> None:
    before = engines([(50, 100)] * 8, [])
    for byte_s, way, seconds in ((1e-7, "transfer", 0.01), (1e-4, "recompute", 0.5)):
        end = LinkEnd(form=FORM, byte_s=byte_s)
        chosen = moves(before, {"recompute": recompute_s(before), "transfer": transfer_s([end, end])})
        assert {(move.way, round(move.seconds, 6)) for move in chosen} == {(way, seconds)}


@pytest.mark.parametrize("form", [None, CacheForm(name="another", token_bytes=1000)])
def test_caches_that_do_not_fit_are_not_sent(form: CacheForm | None) -> None:
    move_s = transfer_s([LinkEnd(form=FORM), LinkEnd(form=form)])
    assert move_s(0, 1, 50) == move_s(1, 0, 50) == math.inf


def test_no_cache_is_sent_that_is_too_large_for_the_process_of_the_run() -> None:
    move_s = transfer_s([LinkEnd(form=FORM), LinkEnd(form=FORM)])
    assert move_s(0, 1, MOST_BYTES // 1000) < math.inf
    assert move_s(0, 1, MOST_BYTES // 1000 + 1) == math.inf


def test_the_way_to_another_datacentre_is_slower_until_it_is_measured() -> None:
    near, far = LinkEnd(form=FORM, datacentre="east"), LinkEnd(form=FORM, datacentre="west")
    assert transfer_s([near, far])(0, 1, 50) > 5 * transfer_s([near, near])(0, 1, 50)
    known = replace(far, byte_s=1e-9)
    assert transfer_s([known, replace(near, byte_s=1e-9)])(0, 1, 50) == pytest.approx(50 * 1000 * 2e-9)


def test_a_link_is_as_fast_as_it_was_of_late() -> None:
    link = ObservedLink()
    link.sent(1000, 5.0)
    assert link.byte_s is None, "so few bytes tell nothing"
    link.sent(10**7, 1.0)
    assert link.byte_s == pytest.approx(1e-7)
    for _ in range(50):
        link.sent(10**7, 0.1)
    assert link.byte_s == pytest.approx(1e-8, rel=0.05)
