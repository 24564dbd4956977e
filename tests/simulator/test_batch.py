"""Claims on a continuous batch that is advanced by stretches of steps."""

from collections.abc import Sequence as List
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.planning.step_times.operators import Pass
from tailrace.simulator.batch import Batch, Sequence
from tests.engine.paper_rank import PaperReplica, request_of


@dataclass(frozen=True)
class Plain:
    """Steps of a second, `each` more for each sequence that decodes, a thousandth for each token of prompts."""

    each: float = 0.1

    def step_s(
        self, tp: int, batch_size: float, context_tokens: float, replicas: int, others: float | None = None
    ) -> float:
        return 1 + self.each * batch_size

    def prefill_s(self, tp: int, batch_size: float, rms_length: float) -> float:
        return 1 + 1e-3 * batch_size * rms_length

    def mixed_s(self, tp: int, batch_size: float, context_tokens: float, chunk: Pass) -> float:
        return 1 + self.each * batch_size + 1e-3 * chunk.tokens


def batch(*, slots: int = 4, cache_tokens: float = 1e9, prefill_tokens: int = 100, block: int = 1) -> Batch:
    return Batch(times=Plain(), slots=slots, cache_tokens=cache_tokens, prefill_tokens=prefill_tokens, block=block)


def run(engine: Batch, sequences: List[Sequence]) -> tuple[float, dict[int, float]]:
    """The seconds until all is done, and the time at which each sequence ended."""
    for sequence in sequences:
        engine.add(sequence)
    now, ends = 0.0, {}
    while (seconds := engine.begin()) is not None:
        now += seconds
        for sequence in engine.end().ended:
            ends[sequence.arrival] = now
    return now, ends


def test_a_response_takes_a_step_for_its_prompt_and_one_for_each_further_token() -> None:
    seconds, _ = run(batch(), [Sequence(prompt=50, length=5)])
    assert seconds == pytest.approx(1.05 + 4 * 1.1)


def test_a_long_prompt_is_computed_in_parts_beside_what_decodes() -> None:
    engine = batch()
    engine.add(Sequence(prompt=10, length=100))
    assert engine.begin() == pytest.approx(1.01)
    engine.end()
    engine.add(Sequence(prompt=250, length=1))
    assert engine.begin() == pytest.approx(2 * (1 + 0.1 + 0.1))  # two parts of 100 tokens
    engine.end()
    assert engine.begin() == pytest.approx(1 + 0.1 + 0.05)


def test_a_group_computes_its_prompt_once() -> None:
    engine = batch()
    run(engine, [Sequence(prompt=80, length=3, group=7) for _ in range(4)])
    assert engine.computed == 80 + 3  # each other one computes the prompt's last token, which gives the logits


@pytest.mark.parametrize(("others", "computed"), [(900, 1), (950, 80)])
def test_a_prompt_stays_in_the_cache_until_its_room_is_used(others: int, computed: int) -> None:
    """1,000 tokens of room: those of the others take what has been free for longest, the prompt's room at last."""
    engine = batch(cache_tokens=1000)
    run(engine, [Sequence(prompt=80, length=3, group=7)])
    run(engine, [Sequence(prompt=1, length=others)])
    before = engine.computed
    run(engine, [Sequence(prompt=80, length=3, group=7)])
    assert engine.computed - before == computed


def test_new_weights_use_nothing_that_older_ones_have_computed_but_what_came_along() -> None:
    engine = batch(slots=2)
    run(engine, [Sequence(prompt=80, length=3, group=7)])
    engine.add(running := Sequence(prompt=10, length=50, group=8))
    engine.begin()
    engine.end()
    engine.forget()
    next_turn = Sequence(prompt=60, length=1, cached=50)
    moved = Sequence(prompt=20, length=9, made=5, cached=25)
    for sequence in (next_turn, moved):
        engine.add(sequence)
    engine.forget()
    before = engine.computed
    run(engine, [Sequence(prompt=80, length=3, group=7), Sequence(prompt=10, length=1, group=8)])
    assert engine.computed - before == 80 + 10 + 60 + 1
    assert (running.made, engine.held_tokens) == (50, 0)


def test_new_weights_may_have_all_computed_again() -> None:
    engine = batch()
    engine.add(running := Sequence(prompt=10, length=50))
    engine.begin()
    engine.cut(0.0)
    engine.end()
    engine.add(Sequence(prompt=20, length=9, made=5, cached=25))
    engine.forget(recompute=True)
    run(engine, [])
    assert engine.computed == 10 + (10 + 1) + (20 + 5)
    assert running.made == 50


def test_the_larger_priority_starts_first() -> None:
    order = [Sequence(prompt=1, length=2, priority=p) for p in (1.0, 3.0, 2.0)]
    _, ends = run(batch(slots=1), order)
    assert sorted(ends, key=lambda arrival: ends[arrival]) == [1, 2, 0]


@pytest.mark.parametrize("cache_tokens", [30, 31])
def test_the_last_is_preempted_when_the_cache_is_full_and_computes_its_tokens_again(cache_tokens: int) -> None:
    engine = batch(slots=2, cache_tokens=cache_tokens)
    _, ends = run(engine, [Sequence(prompt=10, length=15), Sequence(prompt=5, length=15)])
    assert engine.preemptions == 1
    assert ends[0] < ends[1]
    assert engine.computed > 15
    assert engine.held_tokens == 0


def test_a_stretch_that_is_cut_ends_with_the_step_under_way() -> None:
    engine = batch()
    sequence = Sequence(prompt=1, length=100)
    engine.add(sequence)
    engine.begin()
    engine.end()
    engine.begin()
    assert engine.made(sequence, elapsed_s=2.5 * 1.1) == 3
    assert engine.cut(elapsed_s=2.5 * 1.1) == pytest.approx(3 * 1.1)
    engine.end()
    assert engine.made(sequence) == 4


def test_a_response_goes_on_elsewhere_with_the_tokens_that_it_has() -> None:
    engine = batch()
    engine.add(begun := Sequence(prompt=10, length=20, made=12))
    engine.begin()
    engine.end()
    assert (engine.computed, engine.made(begun)) == (22, 13)
    engine.remove(begun)
    assert (engine.running, engine.held_tokens, begun.made) == (0, 0, 13)


def test_what_comes_during_a_step_that_is_decided_ahead_waits_for_the_next_one_too() -> None:
    engine = Batch(times=Plain(), slots=4, cache_tokens=1e9, prefill_tokens=100, ahead=True)
    engine.add(Sequence(prompt=10, length=100))
    assert engine.begin() == pytest.approx(1.01)  # nothing was under way: it begins at once
    engine.add(late := Sequence(prompt=20, length=5))
    assert engine.waiting == 1
    engine.end()
    assert engine.begin() == pytest.approx(1.1)
    engine.end()
    assert engine.begin() == pytest.approx(1.12)
    assert engine.end().started == [late]


def test_what_comes_during_the_last_step_begins_after_it() -> None:
    engine = Batch(times=Plain(), slots=4, cache_tokens=1e9, prefill_tokens=100, ahead=True)
    engine.add(Sequence(prompt=10, length=1))
    engine.begin()
    engine.add(late := Sequence(prompt=20, length=1))
    engine.end()
    assert engine.begin() == pytest.approx(1.02)
    assert engine.end().ended == [late]


REQUESTS = st.lists(
    st.tuples(st.integers(1, 300), st.integers(1, 60), st.integers(-1, 3), st.integers(0, 3)), min_size=1, max_size=25
)


@given(REQUESTS, st.integers(1, 8), st.integers(400, 2000), st.data())
@settings(max_examples=200, deadline=None)
def test_stretches_take_as_long_as_single_steps(
    requests: list[tuple[int, int, int, int]], slots: int, cache: int, data: st.DataObject
) -> None:
    """Cutting each stretch to one step changes nothing: no token is lost, none is made twice, each ends when it did."""

    def made(*, single: bool) -> tuple[list[tuple[float, int]], float, int]:
        engine = batch(slots=slots, cache_tokens=cache)
        prompts = {group: prompt for prompt, _, group, _ in requests}
        for prompt, length, group, priority in requests:
            prompt = prompt if group == -1 else prompts[group]
            engine.add(Sequence(prompt=prompt, length=length, group=group, priority=priority))
        now, ends = 0.0, []
        while (seconds := engine.begin()) is not None:
            now += engine.cut(0.0) if single else seconds
            ends += [(round(now, 6), sequence.arrival) for sequence in engine.end().ended]
        assert engine.running == engine.waiting == engine.held_tokens == 0
        return sorted(ends), round(now, 6), engine.generated

    stretches, steps = made(single=False), made(single=True)
    assert len(stretches[0]) == len(requests)
    assert stretches[2] == sum(length for _, length, _, _ in requests)
    assert stretches == steps


def test_a_sequence_whose_cache_has_come_along_goes_on_at_once() -> None:
    first, second = batch(), batch()
    first.add(moved := Sequence(prompt=10, length=8, group=3))
    first.begin()
    first.end()
    assert (moved.made, first.clear()) == (1, [moved])
    assert first.held_tokens == 0
    assert second.resume(moved)
    assert second.begin() == pytest.approx(7 * 1.1)
    assert second.end().ended == [moved]
    assert (second.generated, second.computed, second.held_tokens) == (7, 0, 0)


def test_the_others_of_a_group_find_a_prompt_that_has_come_along() -> None:
    engine = batch()
    assert engine.resume(Sequence(prompt=80, length=9, group=7, made=2))
    _, ends = run(engine, [Sequence(prompt=80, length=3, group=7)])
    assert ends[1] < ends[0], "it begins at once"
    assert (engine.computed, engine.held_tokens) == (1, 0)


def test_a_sequence_is_not_resumed_without_room() -> None:
    engine = batch(slots=1)
    assert engine.resume(Sequence(prompt=10, length=8, made=2))
    assert not engine.resume(Sequence(prompt=10, length=8, made=2))


def test_a_stretch_has_no_more_steps_than_it_may() -> None:
    engine = Batch(times=Plain(), slots=4, cache_tokens=1e9, most_steps=3)
    engine.add(Sequence(prompt=10, length=8))
    assert engine.decoded is None
    engine.begin()
    assert engine.decoded is None, "it computes a prompt"
    engine.end()
    assert engine.begin() == pytest.approx(3 * 1.1)
    decoded = engine.decoded
    assert decoded is not None
    assert (decoded.steps, decoded.sequences, decoded.context_tokens) == (3, 1, 11)


def test_a_sequence_that_goes_on_at_another_replica_does_not_end_here() -> None:
    """There it would end with the step of the same number."""
    here, there = batch(), batch()
    stays, goes, other = (Sequence(prompt=1, length=length) for length in (9, 5, 9))
    for engine, sequences in ((here, (stays, goes)), (there, (other,))):
        for sequence in sequences:
            engine.add(sequence)
        engine.begin()
        engine.end()
    here.remove(goes)
    there.add(goes)
    there.begin()
    there.end()
    here.begin()
    assert here.end().ended == [stays]
    assert there.begin() is not None
    assert there.end().ended == [goes]


ENGINE_REQUESTS = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 12), st.integers(-1, 3), st.integers(0, 3)), min_size=1, max_size=16
)


@given(ENGINE_REQUESTS, st.integers(1, 8), st.integers(10, 80), st.sets(st.integers(1, 40), max_size=3))
@settings(max_examples=200, deadline=None)
def test_each_response_ends_with_the_step_with_which_it_ends_in_the_engine(
    requests: list[tuple[int, int, int, int]], slots: int, prefill_tokens: int, updates: set[int]
) -> None:
    """The engine's scheduler makes the same steps, where the cache has room for all. New weights come before some."""
    simulated = batch(slots=slots, prefill_tokens=prefill_tokens, block=4)
    real = PaperReplica.of(1000, block_size=4, batch=slots, prefill_tokens=prefill_tokens)
    prompts = {group: prompt for prompt, _, group, _ in requests}
    for number, (prompt, length, group, priority) in enumerate(requests):
        prompt, first = (prompt, 1000 + number) if group == -1 else (prompts[group], group)
        simulated.add(Sequence(prompt=prompt, length=length, group=group, priority=priority))
        real.add(request_of(number, [first] * prompt, length, group_id=first, priority=priority))
    step = 0
    while simulated.running or simulated.waiting:
        if step in updates:
            simulated.forget()
            real.scheduler.new_weights(recompute=False)
            real.rank.weights += 1
        simulated.begin()
        simulated.cut(0.0)
        ended = sorted(sequence.arrival for sequence in simulated.end().ended)
        assert (step, sorted(sample.request_id for sample in real.step())) == (step, ended)
        step += 1
    assert real.scheduler.running == real.scheduler.waiting == simulated.held_tokens == 0
    assert real.scheduler.counts.prefilled_tokens == simulated.computed
