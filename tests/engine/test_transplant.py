"""Sequences that move between replicas, on ranks that assert that every read and write of the cache is right."""

from collections.abc import Sequence as Series
from math import lcm

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tailrace.config.engine import NativeEngineConfig
from tailrace.engine.decoder.factory import local_sizes
from tailrace.engine.scheduling.blocks import BlockManager
from tailrace.engine.scheduling.migration import Migration
from tailrace.engine.scheduling.scheduler import Counts, Scheduler
from tailrace.engine.scheduling.sequence import Sequence
from tailrace.engine.scheduling.stopping import StopRule
from tailrace.engine.scheduling.transplant import Transplant, plan_transplant
from tailrace.planning.replicas import Dispatcher
from tailrace.types import Request, Sample
from tests.engine.architectures import small_architecture
from tests.engine.paper_rank import VOCABULARY, PaperRank, PaperReplica, expected_response, request_of

DEGREES = {2: (1, 2), 4: (1, 2, 4), 6: (1, 2, 3, 6), 8: (1, 2, 4, 8)}
"""The possible degrees, by the number of ranks."""


class Node:
    """Paper ranks that can be rearranged: the driver's side of an engine's switch."""

    def __init__(self, ranks: int, blocks: dict[int, int], *, block_size: int, batch: int, prefill: int) -> None:
        """`blocks`: the blocks of a replica's cache, by degree."""
        self.ranks, self.tp, self.weights = ranks, 1, 0
        self.counts = Counts()
        self._blocks, self._block_size, self._batch, self._prefill = blocks, block_size, batch, prefill
        self.replicas = self.make(1)
        self.dispatcher = Dispatcher(self.schedulers)

    @property
    def schedulers(self) -> list[Scheduler]:
        return [replica.scheduler for replica in self.replicas]

    @property
    def sequences(self) -> list[Sequence]:
        return [sequence for scheduler in self.schedulers for sequence in scheduler.sequences]

    def add(self, request: Request) -> None:
        self.dispatcher.choose(request.group_id).add(
            request, StopRule(request.sampling, eos_ids=(), room=1000, detokenize=None)
        )

    def make(self, tp: int) -> list[PaperReplica]:
        return [
            PaperReplica(
                Scheduler(
                    BlockManager(self._blocks[tp], self._block_size),
                    max_batch_size=self._batch,
                    prefill_tokens=self._prefill,
                    counts=self.counts,
                ),
                PaperRank(self._block_size, self.weights),
                self.weights,
            )
            for _ in range(self.ranks // tp)
        ]

    def plan(self, tp: int, *, move: bool) -> tuple[Transplant, list[PaperReplica]]:
        new = self.make(tp)
        schedulers = [replica.scheduler for replica in new]
        return plan_transplant(self.schedulers, schedulers, source_tp=self.tp, target_tp=tp, move=move), new

    def switch(self, tp: int, *, move: bool = True) -> Transplant:
        plan, new = self.plan(tp, move=move)
        old, first = self.replicas, self.tp
        self.replicas, self.tp = new, tp
        self.dispatcher = Dispatcher(self.schedulers)
        carry(plan, old, new, lcm(first, tp) // first, lcm(first, tp) // tp)
        plan.commit([replica.scheduler for replica in old], self.dispatcher.choose)
        return plan

    def new_weights(self, *, recompute: bool) -> None:
        self.weights += 1
        for replica in self.replicas:
            replica.scheduler.new_weights(recompute=recompute)
            replica.rank.weights = replica.version = self.weights

    def step(self) -> list[Sample]:
        self.dispatcher.balance()
        busy = [replica for replica in self.replicas if replica.scheduler.sequences]
        return [sample for replica in busy for sample in replica.step()]

    def run(self) -> dict[int, Sample]:
        samples: list[Sample] = []
        for _ in range(5000):
            if not self.sequences:
                return {sample.request_id: sample for sample in samples}
            samples += self.step()
        raise AssertionError("it does not finish")


def carry(plan: Transplant, old: Series[PaperReplica], new: Series[PaperReplica], sources: int, targets: int) -> None:
    """Carry out the migrations as ranks do: `sources` old replicas meet, and become `targets` new ones."""
    assert len(plan.migrations) == len(new)
    for index, (migrations, replica) in enumerate(zip(plan.migrations, new, strict=True)):
        meet = index // targets
        assert [len(migration.sources) for migration in migrations] in ([sources], [sources, len(old)])
        near = plan.migrations[meet * targets]
        assert [m.sources for m in migrations] == [m.sources for m in near], "all that meet send the same"
        written = [number for migration in migrations for _, _, number in migration.targets]
        assert len(set(written)) == len(written), "each block is written once"
        assert all(replica.scheduler.blocks.references(number) for number in written)
        for first, migration in zip((meet * sources, 0), migrations, strict=False):
            copy_blocks(migration, old[first : first + len(migration.sources)], replica)


def copy_blocks(migration: Migration, old: Series[PaperReplica], new: PaperReplica) -> None:
    assert all(len(set(blocks)) == len(blocks) for blocks in migration.sources)
    for source, position, number in migration.targets:
        block, slots = migration.sources[source][position], old[source].rank.slots
        for offset in range(new.rank.block_size):
            if (block, offset) in slots:
                new.rank.slots[number, offset] = slots[block, offset]


class TransplantMachine(RuleBasedStateMachine):
    """Every request gets its tokens, and no block is lost, however often the ranks are rearranged."""

    @initialize(data=st.data(), ranks=st.sampled_from(sorted(DEGREES)), block_size=st.integers(1, 5))
    def begin(self, data: st.DataObject, ranks: int, block_size: int) -> None:
        blocks = {tp: data.draw(st.integers(3, 20)) for tp in DEGREES[ranks]}
        batch, prefill = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 20))
        self.batch = batch
        self.least = min(blocks.values())
        self.node = Node(ranks, blocks, block_size=block_size, batch=batch, prefill=prefill)
        self.open: dict[int, Request] = {}
        self.arrivals = 0

    @rule(
        group=st.integers(0, 3),
        length=st.integers(1, 20),
        tokens=st.integers(1, 20),
        members=st.integers(1, 4),
        priority=st.sampled_from((0.0, 0.0, 1.0)),
    )
    def add(self, group: int, length: int, tokens: int, members: int, priority: float) -> None:
        prompt: list[int] = np.random.default_rng(group).integers(0, VOCABULARY, length).tolist()
        for _ in range(members):
            if self.node.schedulers[0].blocks_needed(length, tokens) <= self.least:
                request = request_of(self.arrivals, prompt, tokens, group_id=group, priority=priority)
                self.open[self.arrivals] = request
                self.node.add(request)
                self.arrivals += 1

    @rule(numbers=st.lists(st.integers(0, 30), max_size=3))
    def abort(self, numbers: list[int]) -> None:
        for scheduler in self.node.schedulers:
            self.check(scheduler.abort(numbers))

    @rule(recompute=st.booleans())
    def new_weights(self, recompute: bool) -> None:
        self.node.new_weights(recompute=recompute)

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.check(self.node.step())
            assert all(scheduler.running <= self.batch for scheduler in self.node.schedulers)

    @precondition(lambda self: hasattr(self, "node"))
    @rule(data=st.data(), move=st.booleans())
    def switch(self, data: st.DataObject, move: bool) -> None:
        node = self.node
        before = [{s: s.order for s in scheduler.sequences} for scheduler in node.schedulers]
        held = [{s: list(s.blocks) for s in scheduler.sequences} for scheduler in node.schedulers]
        ran = [s for s in node.sequences if s.cached]
        plan = node.switch(data.draw(st.sampled_from([tp for tp in DEGREES[node.ranks] if tp != node.tp])), move=move)
        now = {s: number for number, scheduler in enumerate(node.schedulers) for s in scheduler.sequences}
        assert sorted(s.request.request_id for s in now) == sorted(self.open), "no sequence is lost or doubled"
        assert all(scheduler.running <= self.batch for scheduler in node.schedulers)
        assert move or not plan.blocks
        homes = [now[s] for s in ran]
        shares = [homes.count(number) for number in range(len(node.schedulers))]
        assert max(shares) - min(shares) <= 1, "what ran is shared out, also where it is computed again"
        for orders, blocks in zip(before, held, strict=True):
            for one, other in ((a, b) for a in orders for b in orders if orders[a] < orders[b] and now[a] == now[b]):
                assert one.order < other.order
            moved = [s for s in orders if s in plan.blocks]
            for one, other in ((a, b) for a in moved for b in moved if now[a] == now[b]):
                for index, shared in enumerate(set(pair) for pair in zip(blocks[one], blocks[other], strict=False)):
                    assert len(shared) > 1 or one.blocks[index] == other.blocks[index], "what was shared stays so"

    @precondition(lambda self: hasattr(self, "node"))
    @rule(data=st.data())
    def switch_that_is_given_up(self, data: st.DataObject) -> None:
        """Plan a switch and drop it: nothing changes."""
        self.node.plan(data.draw(st.sampled_from(DEGREES[self.node.ranks])), move=True)

    def check(self, samples: Series[Sample]) -> None:
        for sample in samples:
            request = self.open.pop(sample.request_id)
            response = sample.response_ids.tolist()
            assert response == expected_response(request, len(response))
            assert sample.rollout_log_probs.tolist() == [-float(token) for token in response]
            assert (np.diff(sample.weight_versions) >= 0).all()

    @invariant()
    def every_reference_has_a_holder(self) -> None:
        for scheduler in self.node.schedulers if hasattr(self, "node") else []:
            held = [block for sequence in scheduler._running for block in sequence.blocks]
            counted = [scheduler.blocks.references(block) for block in range(scheduler.blocks.total)]
            assert counted == [held.count(block) for block in range(scheduler.blocks.total)]
            assert not any(s.cached or s.blocks or s.tip for s in scheduler._waiting)

    def teardown(self) -> None:
        if not hasattr(self, "node"):
            return
        self.check(list(self.node.run().values()))
        assert not self.open, "every request must finish"
        assert sum(scheduler.blocks.used for scheduler in self.node.schedulers) == 0


TestTransplant = TransplantMachine.TestCase
TestTransplant.settings = settings(max_examples=60, stateful_step_count=25)


def node_of(blocks: dict[int, int], **changes: int) -> Node:
    return Node(max(blocks), blocks, **{"block_size": 4, "batch": 8, "prefill": 64} | changes)


def test_a_group_whose_replicas_become_one_shares_its_prompt_once() -> None:
    node = node_of({1: 20, 2: 20})
    prompt = list(range(9))
    for number, scheduler in enumerate(2 * node.schedulers):
        request = request_of(number, prompt, 8, group_id=0)
        scheduler.add(request, StopRule(request.sampling, eos_ids=(), room=1000, detokenize=None))
    for _ in range(3):
        node.step()
    assert [scheduler.blocks.used for scheduler in node.schedulers] == [4, 4]
    node.switch(2)
    (scheduler,) = node.schedulers
    assert scheduler.running == 4
    assert scheduler.blocks.used == 2 + 4, "two full blocks of the prompt, found twice, and one more of each"
    assert len(node.run()) == 4


def test_a_new_request_shares_the_prompt_of_a_sequence_that_has_moved() -> None:
    node = node_of({1: 20, 2: 20})
    node.add(request_of(0, list(range(9)), 8, group_id=0))
    node.step()
    node.switch(2)
    node.add(request_of(1, list(range(9)), 8, group_id=0))
    before = node.counts.shared_tokens
    node.step()
    assert node.counts.shared_tokens - before == 8


def test_what_older_weights_computed_is_not_shared_after_a_switch() -> None:
    node = node_of({1: 20, 2: 20})
    node.add(request_of(0, list(range(9)), 8, group_id=0))
    node.step()
    node.new_weights(recompute=False)
    node.switch(2)
    node.add(request_of(1, list(range(9)), 8, group_id=0))
    node.step()
    assert node.counts.shared_tokens == 0


@given(running=st.integers(1, 12), blocks=st.integers(4, 20), batch=st.integers(1, 8))
@settings(max_examples=40)
def test_who_has_no_room_or_no_place_waits_and_the_last_in_the_order_does_so_first(
    running: int, blocks: int, batch: int
) -> None:
    node = node_of({1: 40, 2: blocks}, batch=batch, block_size=2)
    for number in range(running):
        node.add(request_of(number, [number, 1, 2], 4))
    node.step()
    began = sum(scheduler.running for scheduler in node.schedulers)
    node.switch(2)
    (scheduler,) = node.schedulers
    fitting = min(began, batch, blocks // 3)  # each sequence needs two blocks for four tokens, and one to grow
    assert scheduler.running == fitting
    orders = [sequence.order for sequence in scheduler.sequences]
    assert max(orders[:fitting]) < min(orders[fitting:], default=(1.0, 0)) or batch < running
    assert len(node.run()) == running


def test_padded_heads_make_the_merged_cache_smaller_than_the_sum_and_some_wait() -> None:
    """There are 9 query and 3 KV heads at TP 2: rank 1 has a head of zeros, whose room is lost."""
    architecture = small_architecture(hidden_size=36, head_dim=4, query_heads=9, kv_heads=3)
    config = NativeEngineConfig(dtype="float32", block_size=4, kv_cache_gib=3 * 2 * 2 * 4 * 4 * 4 * 12 / 2**30)
    blocks = {tp: local_sizes(config, architecture, tp)[1] for tp in (1, 2)}
    assert blocks == {1: 12, 2: 18}
    node = node_of(blocks)
    for number in range(8):
        node.add(request_of(number, [number, 1, 2, 3, 4, 5], 6))
    for _ in range(2):
        node.step()
    assert sum(scheduler.running for scheduler in node.schedulers) == 8
    node.switch(2)
    (scheduler,) = node.schedulers
    assert 0 < scheduler.running < 8 == scheduler.running + scheduler.waiting
    assert sorted(node.run()) == list(range(8))


def uneven(counts: Series[int]) -> Node:
    """A node of TP 1 whose replicas run so many sequences."""
    node = node_of(dict.fromkeys(DEGREES[len(counts)], 60), batch=12, prefill=200)
    for number, index in enumerate(index for index, count in enumerate(counts) for _ in range(count)):
        request = request_of(number, [number, 1, 2, 3, 4], 6)
        node.schedulers[index].add(request, StopRule(request.sampling, eos_ids=(), room=1000, detokenize=None))
    for replica in node.replicas:  # without the dispatcher, which would share out what waits
        if replica.scheduler.sequences:
            replica.step()
    return node


@pytest.mark.parametrize(("target", "sizes"), [(2, [3, 3, 3, 3]), (4, [6, 6]), (8, [12])])
def test_sequences_are_shared_out_over_all_replicas_of_the_new_degree(target: int, sizes: list[int]) -> None:
    node = uneven([5, 4, 3, 0, 0, 0, 0, 0])
    plan = node.switch(target)
    assert [scheduler.running for scheduler in node.schedulers] == sizes
    assert len(plan.blocks) == 12, "all caches have moved"
    assert {len(migrations) for migrations in plan.migrations} == {1 if target == 8 else 2}
    assert len(node.run()) == 12


def test_only_what_leaves_its_ranks_is_exchanged_among_all() -> None:
    plan = uneven([2, 2, 0, 0, 2, 0, 1, 0]).switch(2)
    assert [[len(blocks) for blocks in near.sources] for near, _ in plan.migrations] == [[0, 4], [0, 0], [4, 0], [2, 0]]
    assert [len(blocks) for blocks in plan.migrations[0][1].sources] == [4, 0, 0, 0, 0, 0, 0, 0]
    assert [len(across.targets) for _, across in plan.migrations] == [0, 4, 0, 0]


@pytest.mark.parametrize(("ranks", "source", "target"), [(6, 2, 3), (6, 3, 2), (4, 2, 4), (4, 4, 1)])
def test_replicas_that_become_several_deal_their_sequences_out_evenly(ranks: int, source: int, target: int) -> None:
    node = Node(ranks, dict.fromkeys(DEGREES[ranks], 60), block_size=4, batch=12, prefill=200)
    node.switch(source)
    for number in range(12):
        node.add(request_of(number, [number, 1, 2], 6))
    node.step()
    node.switch(target)
    sizes = [scheduler.running for scheduler in node.schedulers]
    assert sum(sizes) == 12
    assert max(sizes) - min(sizes) <= 1
    assert len(node.run()) == 12
