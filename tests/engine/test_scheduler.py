"""The scheduler, with a rank that asserts that every read and write of the cache is right."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tailrace.config.engine import SamplingConfig
from tailrace.engine.scheduling.scheduler import StepPlan
from tailrace.engine.scheduling.sequence import Sequence
from tailrace.engine.scheduling.step import Draw, StepOutput
from tailrace.types import FinishReason, Request, Sample
from tests.engine.paper_rank import VOCABULARY, PaperReplica, expected_response, request_of

SYSTEM = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def prompt_of(group: int, length: int, shared: int = 0) -> list[int]:
    """The prompt of a group. Its first `shared` tokens are those of the system prompt."""
    own: list[int] = np.random.default_rng(group).integers(0, VOCABULARY, 100).tolist()
    return (SYSTEM[:shared] + own)[:length]


class SchedulerMachine(RuleBasedStateMachine):
    """Every request gets its tokens and no block is lost, while others join, leave, are preempted or lose the cache."""

    @initialize(
        blocks=st.integers(3, 20), block_size=st.integers(1, 5), batch=st.integers(1, 6), prefill=st.integers(1, 20)
    )
    def begin(self, blocks: int, block_size: int, batch: int, prefill: int) -> None:
        self.replica = PaperReplica.of(blocks, block_size=block_size, batch=batch, prefill_tokens=prefill)
        self.scheduler = self.replica.scheduler
        self.batch, self.prefill = batch, prefill
        self.arrivals = 0
        self.open: dict[int, Request] = {}
        self.turns: list[list[int]] = []
        """Prompts with their responses, for next turns."""
        self.seen: dict[Sequence, int] = {}
        """The weights at the latest start of each sequence."""
        self.under_way: tuple[StepPlan, StepOutput] | None = None

    @rule(
        group=st.integers(0, 3),
        length=st.integers(1, 20),
        shared=st.integers(0, 9),
        tokens=st.integers(1, 20),
        members=st.integers(1, 4),
        priority=st.sampled_from((0.0, 0.0, 1.0)),
    )
    def add(self, group: int, length: int, shared: int, tokens: int, members: int, priority: float) -> None:
        for _ in range(members):
            self.submit(prompt_of(group, length, shared), tokens, group, priority)

    @precondition(lambda self: self.turns)
    @rule(data=st.data(), more=st.lists(st.integers(0, 9), min_size=1, max_size=4), tokens=st.integers(1, 9))
    def add_next_turn(self, data: st.DataObject, more: list[int], tokens: int) -> None:
        self.submit(data.draw(st.sampled_from(self.turns)) + more, tokens, 100, 0.0)

    def submit(self, prompt: list[int], tokens: int, group: int, priority: float) -> None:
        if self.scheduler.blocks_needed(len(prompt), tokens) <= self.scheduler.blocks.total:
            request = request_of(self.arrivals, prompt, tokens, group_id=group, priority=priority)
            self.open[self.arrivals] = self.replica.add(request)
            self.arrivals += 1

    @rule(numbers=st.lists(st.integers(0, 30), max_size=3))
    def abort(self, numbers: list[int]) -> None:
        aborted = self.scheduler.abort(numbers)
        assert sorted(sample.request_id for sample in aborted) == sorted(self.open.keys() & set(numbers))
        for sample in aborted:
            self.check(sample)

    @rule(number=st.integers(0, 30))
    def leave_and_come_back(self, number: int) -> None:
        """A response is withdrawn, and comes with its keys and values: older ones are for itself."""
        self.finish_step()
        for sequence in self.scheduler.sequences:
            if sequence.request.request_id != number or number not in self.open:
                continue
            cache = self.replica.rank.cache_of(sequence) if sequence.cached else sequence.came
            (sample,) = self.scheduler.abort([number])
            del self.open[number]
            if len(sample.response_ids) or cache is not None:
                request = dataclasses.replace(
                    sequence.request, request_id=self.arrivals, begun=dataclasses.replace(sample, cache=cache)
                )
                self.open[self.arrivals] = self.replica.add(request)
                self.arrivals += 1

    @rule(recompute=st.booleans())
    def new_weights(self, recompute: bool) -> None:
        self.finish_step()
        self.scheduler.new_weights(recompute=recompute)
        self.replica.rank.weights += 1
        assert not (recompute and self.scheduler.running)

    @rule()
    def restart(self) -> None:
        self.scheduler.restart()
        self.replica.rank.slots.clear()
        self.under_way = None

    @rule(count=st.integers(0, 5))
    def move(self, count: int) -> None:
        before = self.scheduler.waiting
        taken = self.scheduler.take_waiting(count)
        assert len(taken) <= count
        assert self.scheduler.waiting == before - len(taken)
        self.scheduler.give(taken)

    @rule()
    def begin_step(self) -> None:
        self.finish_step()
        old = set(self.scheduler._running)
        aged = {
            sequence for sequence in self.scheduler._waiting if sequence.came is not None and sequence.came.is_mixed
        }
        plan = self.scheduler.schedule()
        self.under_way = plan, self.replica.rank.execute(plan, self.scheduler.blocks)
        self.check_plan(plan, old, aged)

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.begin_step()
        self.finish_step()

    def finish_step(self) -> None:
        if self.under_way is not None:
            plan, output = self.under_way
            self.under_way = None
            for sample in self.scheduler.complete(plan, output, self.replica.rank.weights):
                assert sample.finish_reason == FinishReason.LENGTH
                self.check(sample)

    def check_plan(self, plan: StepPlan, old: set[Sequence], aged: set[Sequence]) -> None:
        """Assert that budgets are kept, and that no sequence reads slots of weights older than its start.

        aged: those that come with older ones of their own.
        """
        chunks = plan.input.chunks
        assert bool(chunks) == bool(self.open), "there is always something to do"
        assert sum(len(chunk.tokens) for chunk in chunks if len(chunk.tokens) > 1) <= self.prefill
        assert self.scheduler.running <= self.batch
        assert len(set(plan.sequences)) == len(plan.sequences)
        sources = {target: source for source, target in plan.input.copies}
        rank = self.replica.rank
        for sequence, chunk in zip(plan.sequences, chunks, strict=True):
            if sequence not in old:
                self.seen[sequence] = 0 if sequence in aged else rank.weights
            for position in range(chunk.start):
                block = chunk.blocks[position // rank.block_size]
                offset = position % rank.block_size
                assert rank.slots[sources.get(block, block), offset][1] >= self.seen[sequence]

    def check(self, sample: Sample) -> None:
        request = self.open.pop(sample.request_id)
        response = sample.response_ids.tolist()
        assert response == expected_response(request, len(response))
        assert sample.rollout_log_probs.tolist() == [-float(token) for token in response]
        assert sample.finish_reason == FinishReason.ABORT or len(response) == request.sampling.max_new_tokens
        assert (np.diff(sample.weight_versions) >= 0).all()
        self.turns.append(request.prompt_ids.tolist() + response)

    @invariant()
    def every_reference_has_a_holder(self) -> None:
        blocks = self.scheduler.blocks
        held = [block for sequence in self.scheduler._running for block in sequence.blocks]
        assert [blocks.references(block) for block in range(blocks.total)] == [
            held.count(block) for block in range(blocks.total)
        ]
        assert self.scheduler.running + self.scheduler.waiting == len(self.open)

    @invariant()
    def every_prompt_token_counts_once(self) -> None:
        counted = sum(sequence.counted for sequence in self.seen)
        assert self.scheduler.counts.prefilled_tokens + self.scheduler.counts.shared_tokens == counted

    def teardown(self) -> None:
        if not hasattr(self, "replica"):
            return
        for _ in range(5000):
            if not self.open:
                break
            self.begin_step()
            self.finish_step()
        assert not self.open, "every request must finish"
        assert self.scheduler.blocks.used == 0


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=80, stateful_step_count=25)


def test_a_group_prefills_its_prompt_once_and_shares_its_full_blocks() -> None:
    replica = PaperReplica.of(40)
    for number in range(8):
        replica.add(request_of(number, prompt_of(0, 10), group_id=0))
    assert replica.started() == [0], "the others wait for the prompt"
    plan = replica.scheduler.schedule()
    assert [len(chunk.tokens) for chunk in plan.input.chunks] == [1] * 8, "only the last prompt token is computed again"
    assert len(plan.input.copies) == 7
    replica.scheduler.complete(plan, replica.rank.execute(plan, replica.scheduler.blocks), 0)
    assert replica.scheduler.blocks.used == 2 + 8, "two full blocks, and one of its own for each"
    assert (replica.scheduler.counts.prefilled_tokens, replica.scheduler.counts.shared_tokens) == (10 + 7, 7 * 9)
    assert len(replica.run()) == 8
    assert replica.scheduler.blocks.used == 0


def test_equal_groups_with_other_prompts_share_nothing_but_what_is_equal() -> None:
    replica = PaperReplica.of(40)
    replica.add(request_of(0, [7, 7, 7, 7, 7], group_id=0))
    replica.add(request_of(1, [7, 7, 9, 7, 7, 7], group_id=0))
    assert replica.started() == [0, 1]
    assert replica.scheduler.counts.prefilled_tokens == 11
    assert len(replica.run()) == 2


def test_groups_that_share_a_system_prompt_compute_it_once() -> None:
    replica = PaperReplica.of(60)
    system = prompt_of(9, 8)
    for number in range(6):
        replica.add(request_of(number, [*system, number // 2, 5, 6], group_id=number // 2))
    assert replica.started() == [0], "the other groups wait for its beginning"
    assert replica.started() == [0, 1, 2, 4]
    assert replica.started() == [0, 1, 2, 4, 3, 5]
    assert replica.scheduler.counts.prefilled_tokens == 8 + 3 * 3 + 3
    assert len(replica.run()) == 6


def test_the_next_turn_of_a_conversation_computes_its_new_tokens_only() -> None:
    replica = PaperReplica.of(20)
    replica.add(request_of(0, prompt_of(0, 6), tokens=5))
    said = prompt_of(0, 6) + replica.run()[0].response_ids.tolist()
    computed = replica.scheduler.counts.prefilled_tokens
    replica.add(request_of(1, [*said, 3, 3], tokens=2))
    plan = replica.scheduler.schedule()
    assert len(plan.input.copies) == 1, "of the last block, which was not full"
    assert [(chunk.start, chunk.tokens) for chunk in plan.input.chunks] == [(10, [said[-1], 3, 3])]
    replica.scheduler.complete(plan, replica.rank.execute(plan, replica.scheduler.blocks), 0)
    assert replica.scheduler.counts.prefilled_tokens == computed + 3
    assert replica.scheduler.counts.shared_tokens == 10


def test_a_preempted_sequence_finds_what_is_left_of_its_cache() -> None:
    replica = PaperReplica.of(10)
    for number in range(2):
        replica.add(request_of(number, prompt_of(number, 4), tokens=20))
    samples = replica.run()
    assert replica.scheduler.counts.preemptions > 0
    assert [samples[n].response_ids.tolist() for n in range(2)] == [
        expected_response(request_of(n, prompt_of(n, 4)), 20) for n in range(2)
    ]
    assert replica.scheduler.counts.prefilled_tokens == 8, "computing it anew does not count"


def test_the_first_to_come_are_the_first_to_start() -> None:
    replica = PaperReplica.of(100, batch=2)
    for number in range(4):
        replica.add(request_of(number, prompt_of(number, 5), tokens=3))
    assert replica.started() == [0, 1]
    assert list(replica.run()) == [0, 1, 2, 3]


def test_the_request_of_the_highest_priority_starts_first() -> None:
    replica = PaperReplica.of(100, batch=2)
    for number, priority in enumerate((5.0, 80.0, 5.0, 300.0)):
        replica.add(request_of(number, prompt_of(number, 5), tokens=3, priority=priority))
    assert replica.started() == [3, 1]
    assert list(replica.run()) == [3, 1, 0, 2]


@pytest.mark.parametrize(("priorities", "victim"), [((0.0, 0.0, 0.0), 2), ((0.0, 7.0, 7.0), 0)])
def test_the_last_in_the_order_gives_way(priorities: tuple[float, ...], victim: int) -> None:
    replica = PaperReplica.of(9)
    for number, priority in enumerate(priorities):
        replica.add(request_of(number, prompt_of(number, 4), tokens=20, priority=priority))
    started = replica.started()
    while not replica.scheduler.counts.preemptions:
        before, started = started, replica.started()
    assert set(before) - set(started) == {victim}


def test_a_preempted_sequence_starts_before_those_that_never_ran() -> None:
    replica = PaperReplica.of(7, batch=2)
    for number in range(4):
        replica.add(request_of(number, prompt_of(number, 4), tokens=16))
    order = list(replica.run())
    assert replica.scheduler.counts.preemptions > 0
    assert order == [0, 1, 2, 3]


def test_prompts_are_computed_in_chunks_within_the_budget_while_others_decode() -> None:
    replica = PaperReplica.of(60, prefill_tokens=8)
    replica.add(request_of(0, prompt_of(0, 3)))
    replica.step()
    replica.add(request_of(1, prompt_of(1, 11)))
    replica.add(request_of(2, prompt_of(2, 9)))
    steps = []
    for _ in range(3):
        plan = replica.scheduler.schedule()
        steps.append([(len(chunk.tokens), chunk.draw is not None) for chunk in plan.input.chunks])
        replica.scheduler.complete(plan, replica.rank.execute(plan, replica.scheduler.blocks), 0)
    assert steps == [[(1, True), (8, False)], [(1, True), (3, True), (5, False)], [(1, True), (1, True), (4, True)]]


@pytest.mark.parametrize(("prompt", "starts"), [(4, True), (5, False)])
def test_a_sequence_starts_where_a_block_is_left_for_each_that_runs(prompt: int, starts: bool) -> None:
    replica = PaperReplica.of(4)
    replica.add(request_of(0, prompt_of(0, 7), tokens=6))
    replica.step()
    replica.add(request_of(1, prompt_of(1, prompt), tokens=6))
    assert replica.started() == ([0, 1] if starts else [0])


def test_a_draw_tells_how_the_request_wants_its_tokens_sampled() -> None:
    replica = PaperReplica.of(4)
    sampling = SamplingConfig(temperature=0.5, top_k=7, top_p=0.75, min_p=0.125)
    replica.add(Request(request_id=0, group_id=0, prompt_ids=np.array([1, 2]), sampling=sampling, seed=2**64 - 1))
    replica.step()
    (chunk,) = replica.scheduler.schedule().input.chunks
    assert chunk.draw == Draw(seed=2**64 - 1, position=1, temperature=0.5, top_k=7, top_p=0.75, min_p=0.125)


def test_seeds_of_any_size_are_drawn_with_in_64_bits() -> None:
    for seed, drawn in ((2**64 + 5, 5), (-1, 2**64 - 1)):
        replica = PaperReplica.of(4)
        replica.add(dataclasses.replace(request_of(0, [1, 2]), seed=seed))
        (chunk,) = replica.scheduler.schedule().input.chunks
        assert chunk.draw is not None
        assert chunk.draw.seed == drawn


@settings(max_examples=60)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 5), st.integers(1, 6))
def test_the_smallest_cache_that_accepts_a_request_serves_it(
    prompt: int, tokens: int, block_size: int, prefill_tokens: int
) -> None:
    probe = PaperReplica.of(1, block_size=block_size)
    blocks = probe.scheduler.blocks_needed(prompt, tokens)
    replica = PaperReplica.of(blocks, block_size=block_size, prefill_tokens=prefill_tokens)
    for number in range(3):
        replica.add(request_of(number, prompt_of(0, prompt), tokens, group_id=0))
    replica.add(request_of(3, prompt_of(1, prompt), tokens))
    for number, sample in replica.run().items():
        prompt_ids = prompt_of(number // 3, prompt)
        assert sample.response_ids.tolist() == expected_response(request_of(number, prompt_ids), tokens)


def test_one_block_less_than_that_would_not_do() -> None:
    replica = PaperReplica.of(3)
    needed = replica.scheduler.blocks_needed(5, 9)
    assert (needed, replica.scheduler.blocks_needed(5, 8)) == (4, 3)
    for _ in range(2):
        replica.add(request_of(0, prompt_of(0, 5), 8))
        assert len(replica.run()[0].response_ids) == 8
    assert replica.scheduler.counts.preemptions == 0


def test_who_is_aborted_while_a_step_is_under_way_gets_nothing_of_it() -> None:
    replica = PaperReplica.of(20)
    for number in range(2):
        replica.add(request_of(number, prompt_of(number, 5), tokens=2))
    replica.step()
    plan = replica.scheduler.schedule()
    output = replica.rank.execute(plan, replica.scheduler.blocks)
    (aborted,) = replica.scheduler.abort([0, 77])
    assert (len(aborted.response_ids), aborted.finish_reason) == (1, FinishReason.ABORT)
    (finished,) = replica.scheduler.complete(plan, output, 0)
    assert (finished.request_id, len(finished.response_ids)) == (1, 2)
    assert replica.scheduler.blocks.used == 0


def test_new_weights_leave_nothing_to_find_and_running_sequences_their_cache() -> None:
    replica = PaperReplica.of(40)
    replica.add(request_of(0, prompt_of(0, 9)))
    replica.step()
    replica.scheduler.new_weights(recompute=False)
    replica.add(request_of(1, prompt_of(0, 9)))
    plan = replica.scheduler.schedule()
    assert [chunk.start for chunk in plan.input.chunks] == [9, 0]
    replica.scheduler.complete(plan, replica.rank.execute(plan, replica.scheduler.blocks), 1)
    assert len(replica.run()) == 2
    replica.scheduler.new_weights(recompute=False)
    assert replica.scheduler.blocks.cached == 0


def test_who_ran_on_older_weights_leaves_nothing_to_find() -> None:
    replica = PaperReplica.of(40)
    for number in range(2):
        replica.add(request_of(number, prompt_of(0, 9)))
        replica.step()
    replica.scheduler.new_weights(recompute=False)
    assert len(replica.run()) == 2
    assert replica.scheduler.blocks.cached == 0


def test_recomputing_for_new_weights_is_no_preemption_and_computes_a_prompt_once() -> None:
    replica = PaperReplica.of(40)
    for number in range(3):
        replica.add(request_of(number, prompt_of(0, 9), group_id=0))
    replica.step()
    replica.step()
    replica.scheduler.new_weights(recompute=True)
    assert (replica.scheduler.running, replica.scheduler.waiting) == (0, 3)
    plan = replica.scheduler.schedule()
    assert [(chunk.start, len(chunk.tokens)) for chunk in plan.input.chunks] == [(0, 11)]
    replica.scheduler.complete(plan, replica.rank.execute(plan, replica.scheduler.blocks), 1)
    plan = replica.scheduler.schedule()
    assert [(chunk.start, len(chunk.tokens)) for chunk in plan.input.chunks] == [(11, 1), (9, 1), (9, 1)]
    replica.scheduler.complete(plan, replica.rank.execute(plan, replica.scheduler.blocks), 1)
    assert replica.scheduler.counts.preemptions == 0
    assert len(replica.run()) == 3


def test_after_a_restart_every_sequence_goes_on_with_its_tokens() -> None:
    replica = PaperReplica.of(40)
    for number in range(3):
        replica.add(request_of(number, prompt_of(number, 5), tokens=9))
    for _ in range(4):
        replica.step()
    replica.scheduler.schedule()
    replica.scheduler.restart()
    replica.rank.slots.clear()
    plan = replica.scheduler.schedule()
    assert [len(chunk.tokens) for chunk in plan.input.chunks] == [9] * 3
    replica.scheduler.complete(plan, replica.rank.execute(plan, replica.scheduler.blocks), 0)
    for number, sample in replica.run().items():
        assert sample.response_ids.tolist() == expected_response(request_of(number, prompt_of(number, 5)), 9)


def test_waiting_sequences_move_in_whole_groups_the_last_first() -> None:
    busy, idle = PaperReplica.of(60, batch=2), PaperReplica.of(60)
    for number in range(12):
        busy.add(request_of(number, prompt_of(number // 3, 5), group_id=number // 3))
    busy.step()
    busy.step()
    taken = busy.scheduler.take_waiting(7)
    assert [sequence.request.request_id for sequence in taken] == [6, 7, 8, 9, 10, 11]
    idle.scheduler.give(taken)
    ids = [[s.request.request_id for s in busy.scheduler.take_waiting(2)] for _ in range(3)]
    assert ids == [[2], [4, 5], [3]], "what is left of a group that runs, before a part of one"
    samples = idle.run()
    assert {n: sample.response_ids.tolist() for n, sample in samples.items()} == {
        n: expected_response(request_of(n, prompt_of(n // 3, 5)), 8) for n in range(6, 12)
    }


def test_sequences_that_gave_way_move_too_after_those_that_never_ran() -> None:
    busy, idle = PaperReplica.of(40), PaperReplica.of(40)
    for number in range(3):
        busy.add(request_of(number, prompt_of(number, 5)))
    busy.step()
    busy.scheduler.restart()
    busy.add(request_of(3, prompt_of(3, 5)))
    taken = [busy.scheduler.take_waiting(count) for count in (1, 2)]
    assert [[sequence.request.request_id for sequence in sequences] for sequences in taken] == [[3], [2]]
    idle.scheduler.give(taken[1])
    assert idle.run()[2].response_ids.tolist() == expected_response(request_of(2, prompt_of(2, 5)), 8)
