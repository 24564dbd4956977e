"""Ranks that change their TP degree: their weights, cache and logits equal those of ranks made at that degree."""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tailrace.config.engine import NativeEngineConfig
from tailrace.engine.collectives.base import Collective
from tailrace.engine.collectives.rendezvous import Rendezvous, rendezvous
from tailrace.engine.decoder.base import Batch, Decoder
from tailrace.engine.decoder.factory import local_sizes, make_decoder
from tailrace.engine.kernels.build import VECTORS
from tailrace.engine.model.shard import WHOLE, Shard
from tailrace.engine.model.sharding import head_slots, shard_weights
from tailrace.engine.ranks.groups import Groups
from tailrace.engine.ranks.rank import Rank
from tailrace.engine.ranks.reshard import SwitchTimes, switch_bytes
from tailrace.engine.scheduling.migration import Migration
from tailrace.engine.scheduling.step import Chunk, Draw
from tailrace.errors import EngineError, ModelError
from tailrace.host.cpu import cpu_flags
from tailrace.models.architecture import Architecture, parameter_shapes
from tests.engine.architectures import small_architecture
from tests.engine.thread_ranks import run_engine

CPU = torch.device("cpu")
GroupOf = Callable[[int], Collective]
DRAW = Draw(0, 0, 0.0, 0, 1.0, 0.0)
SIZES = {"hidden_size": 32, "head_dim": 16, "intermediate_size": 81, "vocab_size": 600}
ARCHITECTURES = {
    "like SmolLM2": small_architecture(**SIZES, query_heads=9, kv_heads=3),
    "replicated KV heads, untied": small_architecture(**SIZES, query_heads=6, kv_heads=2, tied=False, qkv_bias=True),
    "biases": small_architecture(**SIZES, query_heads=8, kv_heads=4, qkv_bias=True, out_bias=True),
    "qk norm, one KV head": small_architecture(**SIZES, query_heads=7, kv_heads=1, qk_norm=True),
}
KINDS = {
    "torch": NativeEngineConfig(dtype="float32", kernels="torch", kv_cache_gib=0.002, block_size=4),
    "cpu": NativeEngineConfig(dtype="bfloat16", kernels="cpu", kv_cache_gib=0.002, block_size=16),
    "cpu, fp32": NativeEngineConfig(dtype="float32", kernels="cpu", kv_cache_gib=0.002, block_size=16),
}
EVERY_CHANGE = {
    4: [1, 2, 4, 2, 1, 4, 1],
    6: [1, 2, 1, 3, 1, 6, 2, 3, 2, 6, 3, 6, 1],
    8: [1, 2, 4, 8, 4, 2, 1, 4, 1, 8, 2, 8, 1],
}
"""Paths of degrees, by the number of ranks: each change between two degrees occurs once."""

_in_cpp = pytest.mark.skipif(not cpu_flags() >= set(VECTORS), reason="this CPU has no AVX2")
kinds = pytest.mark.parametrize(
    "kind", ["torch", *(pytest.param(kind, marks=_in_cpp) for kind in ("cpu", "cpu, fp32"))]
)


def weights_of(architecture: Architecture) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) / 4 for name, shape in parameter_shapes(architecture).items()}


def degrees_of(ranks: int) -> list[int]:
    return [degree for degree in range(1, ranks + 1) if ranks % degree == 0]


@dataclass(frozen=True)
class World:
    """The ranks of one engine."""

    config: NativeEngineConfig
    architecture: Architecture
    ranks: int

    def run(self, work: Callable[[int, GroupOf], Any]) -> list[Any]:
        """Run `work` on each rank, and return its results."""
        return run_engine(self.ranks, degrees_of(self.ranks), work)

    def blocks(self, tp: int) -> int:
        return local_sizes(self.config, self.architecture, tp)[1]

    def fresh(self, rank: int, tp: int, group: GroupOf) -> Decoder:
        """A new decoder with the weights of its shard."""
        shard = Shard(rank % tp, tp)
        decoder = make_decoder(self.config, self.architecture, shard, device=CPU, collective=group(tp))
        decoder.load(shard_weights(self.architecture, shard, weights_of(self.architecture)))
        return decoder

    def rank(self, rank: int, tp: int, group: GroupOf) -> Rank:
        """A rank with its weights."""
        made = Rank(self.config, self.architecture, Shard(rank % tp, tp), device=CPU, collective=group(tp))
        made.load(weights_of(self.architecture))
        return made

    def content(self, number: int) -> torch.Tensor:
        """The keys and values of a block for the whole model, [layers, 2, kv_heads, block_size * head_dim]."""
        a = self.architecture
        shape = (a.layers, 2, a.kv_heads, self.config.block_size * a.head_dim)
        made = torch.randn(shape, generator=torch.Generator().manual_seed(1000 + number))
        return made.to(getattr(torch, self.config.dtype))


Held = list[dict[int, int]]
"""For each replica, the number of the content of each block in use."""


@dataclass(frozen=True)
class Plan:
    """A random switch of all ranks."""

    tp: int
    migrations: list[list[Migration]]
    """Those of each new replica."""
    held: Held
    """The blocks in use after the switch."""


def plan_switch(world: World, held: Held, tp: int, chance: random.Random) -> Plan:
    """Plan a switch that moves some of the blocks in use to new replicas, and some of them to several."""
    old_tp = world.ranks // len(held)
    meetings = [math.lcm(old_tp, tp), *chance.sample([world.ranks], chance.randint(0, 1))]
    after: Held = [{} for _ in range(world.ranks // tp)]
    migrations: list[list[Migration]] = [[] for _ in after]
    unused = [chance.sample(range(world.blocks(tp)), world.blocks(tp)) for _ in after]
    for meet in meetings:
        sources, targets = meet // old_tp, meet // tp
        for group in range(world.ranks // meet):
            members = held[group * sources : (group + 1) * sources]
            lists = [chance.sample(sorted(blocks), chance.randint(0, len(blocks))) for blocks in members]
            places = [(replica, position) for replica, blocks in enumerate(lists) for position in range(len(blocks))]
            for index in range(group * targets, (group + 1) * targets):
                count = chance.randint(0, min(len(places), len(unused[index])))
                moved = [(*place, unused[index].pop()) for place in chance.sample(places, count)]
                migrations[index].append(Migration(lists, moved))
                after[index] |= {number: members[replica][lists[replica][place]] for replica, place, number in moved}
    return Plan(tp, migrations, after)


def first_held(world: World, tp: int, count: int = 9) -> Held:
    """Some blocks in use on each replica."""
    chance = random.Random(tp)
    return [
        dict(zip(chance.sample(range(world.blocks(tp)), count), itertools.count(100 * replica)))
        for replica in range(world.ranks // tp)
    ]


def plan_path(world: World, path: Sequence[int], seed: int) -> tuple[Held, list[Plan]]:
    chance = random.Random(seed)
    held = first = first_held(world, path[0])
    plans = []
    for tp in path[1:]:
        plans.append(plan_switch(world, held, tp, chance))
        held = plans[-1].held
        for blocks in held:  # as if sequences grew
            unused = sorted(set(range(world.blocks(tp))) - set(blocks))
            blocks.update({number: chance.randrange(900) for number in unused[:2]})
    return first, plans


def expected_block(world: World, shard: Shard, number: int) -> torch.Tensor:
    """The shard's part of a block, [layers, 2, local KV heads, X]: zeros where the shard has no head."""
    local, _ = local_sizes(world.config, world.architecture, shard.degree)
    whole = world.content(number)
    block = torch.zeros(*whole.shape[:2], local.kv_heads, whole.shape[3], dtype=whole.dtype)
    for slot, head in enumerate(head_slots(world.architecture, shard)):
        block[:, :, slot] = whole[:, :, head.kv_head]
    return block


def write_blocks(world: World, decoder: Decoder, shard: Shard, blocks: dict[int, int]) -> None:
    for block, number in blocks.items():
        decoder.cache.data[:, :, block] = expected_block(world, shard, number)


def assert_same_weights(found: Decoder, expected: Decoder) -> None:
    assert found.packing.groups == expected.packing.groups
    for group in expected.packing.groups:
        parts, wanted = (d.packing.parts(group, d._memory[group]) for d in (found, expected))
        assert parts.keys() == wanted.keys()
        for name, part in wanted.items():
            assert torch.equal(parts[name], part), name


def logits_of(decoder: Decoder, blocks: Sequence[int], block_size: int) -> torch.Tensor:
    """The logits of a token decoded behind these blocks, and of a short prompt behind the first of them."""
    table = list(blocks)
    start = (len(table) - 1) * block_size
    chunks = [Chunk(start + 1, [7], table, DRAW), Chunk(2, [5, 6], table[:1], DRAW)] if table else []
    return decoder.forward(Batch.of(chunks, block_size)).clone() if table else torch.zeros(0)


def check_path(world: World, path: Sequence[int], seed: int) -> None:
    """Switch along `path`, and compare each rank with a fresh one after each switch."""
    held, plans = plan_path(world, path, seed)

    def work(number: int, group: GroupOf) -> None:
        rank = world.rank(number, path[0], group)
        rank._decoder.cache.data.normal_(generator=torch.Generator().manual_seed(number))  # leftovers of earlier blocks
        write_blocks(world, rank._decoder, Shard(number % path[0], path[0]), held[number // path[0]])
        memory = rank._decoder.cache.data.data_ptr()
        for plan in plans:
            tp, replica = plan.tp, number // plan.tp
            shard = Shard(number % tp, tp)
            rank.switch(shard, plan.migrations[replica], group)
            decoder, fresh = rank._decoder, world.fresh(number, tp, group)
            assert_same_weights(decoder, fresh)
            assert decoder.cache.data.data_ptr() == memory
            assert decoder.cache.data.shape == fresh.cache.data.shape
            for _, _, block in (target for moved in plan.migrations[replica] for target in moved.targets):
                assert torch.equal(
                    decoder.cache.data[:, :, block], expected_block(world, shard, plan.held[replica][block])
                )
            write_blocks(world, decoder, shard, plan.held[replica])  # the blocks by which sequences grew
            assert decoder.cache.data.isfinite().all()
            fresh.cache.data.copy_(decoder.cache.data)
            table = sorted(plan.held[replica])[:2]
            logits, wanted = (logits_of(d, table, world.config.block_size) for d in (decoder, fresh))
            assert logits.isfinite().all()
            assert torch.equal(logits, wanted)
            assert torch.equal(decoder.cache.data, fresh.cache.data)
            write_blocks(world, decoder, shard, plan.held[replica])  # as before the forward pass

    world.run(work)


@kinds
@pytest.mark.parametrize("ranks", EVERY_CHANGE)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_after_every_change_of_degree_ranks_equal_freshly_made_ones_bit_for_bit(
    name: str, ranks: int, kind: str
) -> None:
    heads = ARCHITECTURES[name].query_heads
    path = [tp for tp in EVERY_CHANGE[ranks] if tp <= heads]
    check_path(World(KINDS[kind], ARCHITECTURES[name], ranks), path, seed=0)


@kinds
@settings(max_examples=12)
@given(data=st.data())
def test_any_sequence_of_switches_leaves_the_ranks_as_if_they_had_been_made_so(kind: str, data: st.DataObject) -> None:
    ranks = data.draw(st.sampled_from([2, 3, 4, 6]))
    name = data.draw(st.sampled_from(sorted(ARCHITECTURES)))
    path = data.draw(st.lists(st.sampled_from(degrees_of(ranks)), min_size=2, max_size=5))
    check_path(World(KINDS[kind], ARCHITECTURES[name], ranks), path, seed=data.draw(st.integers(0, 99)))


def empty_migration(sources: int) -> Migration:
    return Migration([[] for _ in range(sources)], [])


@pytest.mark.parametrize("collectives", ["gloo", "shared_memory"])
def test_real_collectives_carry_a_switch(collectives: str) -> None:
    config = KINDS["torch"].model_copy(update={"collectives": collectives})
    world = World(config, ARCHITECTURES["biases"], 2)
    held, plans = plan_path(world, [1, 2, 1], seed=1)

    def work(number: int, place: Rendezvous) -> None:
        groups = Groups(config, number, device=CPU, timeout_s=30.0)
        groups.add(2, place)
        rank = world.rank(number, 1, groups.get)
        write_blocks(world, rank._decoder, WHOLE, held[number])
        for plan in plans:
            shard, replica = Shard(number % plan.tp, plan.tp), number // plan.tp
            rank.switch(shard, plan.migrations[replica], groups.get)
            assert_same_weights(rank._decoder, world.fresh(number, plan.tp, groups.get))
            for _, _, block in (target for moved in plan.migrations[replica] for target in moved.targets):
                expected = expected_block(world, shard, plan.held[replica][block])
                assert torch.equal(rank._decoder.cache.data[:, :, block], expected)
            write_blocks(world, rank._decoder, shard, plan.held[replica])
        groups.close()

    with rendezvous() as place, ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(work, number, place) for number in range(2)]:
            future.result()


def test_a_rank_that_has_switched_takes_new_weights() -> None:
    world = World(KINDS["torch"], ARCHITECTURES["biases"], 2)
    other = {name: tensor + 1 for name, tensor in weights_of(world.architecture).items()}

    def work(number: int, group: GroupOf) -> None:
        rank, fresh = world.rank(number, 2, group), world.rank(number, 1, group)
        rank.switch(WHOLE, [empty_migration(1)], group)
        for one in (rank, fresh):
            one.load(other)
        assert_same_weights(rank._decoder, fresh._decoder)

    world.run(work)


class Recorded(Collective):
    """A collective that records the bytes that its rank sends."""

    def __init__(self, collective: Collective) -> None:
        self.rank, self.size = collective.rank, collective.size
        self.sent: list[int] = []
        self._collective = collective

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._collective.all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self.sent.append(tensor.nbytes)
        with _disable_current_modes():  # allocations of the thread collective are not the switch's
            return self._collective.all_gather(tensor)

    def close(self) -> None:
        self._collective.close()


def recorded(group: GroupOf) -> tuple[GroupOf, dict[int, Recorded]]:
    made: dict[int, Recorded] = {}
    return lambda degree: made.setdefault(degree, Recorded(group(degree))), made


def test_what_ranks_have_already_is_not_exchanged() -> None:
    world = World(KINDS["torch"], ARCHITECTURES["like SmolLM2"], 2)

    def work(number: int, group: GroupOf) -> list[list[int]]:
        rank = world.rank(number, 1, group)
        counts = []
        for shard, replicas in ((Shard(number, 2), 2), (WHOLE, 1)):
            watched, made = recorded(group)
            rank.switch(shard, [empty_migration(replicas)], watched)
            counts.append(made[2].sent)
        return counts

    for apart, together in world.run(work):
        assert apart == []  # each rank has the whole model, and no block is in use
        assert (
            len(together) == 1 + world.architecture.layers
        )  # the embedding and each layer in one piece, without the norm


def test_the_bytes_of_keys_and_values_are_those_that_a_rank_has_sent() -> None:
    world = World(KINDS["torch"], ARCHITECTURES["biases"], 2)
    migration = Migration([[3, 5, 1], [2]], [(0, 1, 4)])

    def work(number: int, group: GroupOf) -> tuple[SwitchTimes, list[int]]:
        watched, made = recorded(group)
        return world.rank(number, 1, group).switch(Shard(number, 2), [migration], watched), made[2].sent

    for times, sent in world.run(work):
        a = world.architecture
        assert times.kv_bytes == sum(sent) == a.layers * 2 * 3 * a.kv_heads * 4 * a.head_dim * 4
        assert min(times.weights_s, times.kv_s) > 0


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The peak memory of all tensors that were seen."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def note(self, result: Any) -> None:
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
        self.most = max(self.most, self.now())

    def now(self) -> int:
        self._seen = {key: entry for key, entry in self._seen.items() if not entry[0].expired()}  # type: ignore[no-untyped-call]
        return sum(size for _, size in self._seen.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note(result)
        return result


class _Noted(Recorded):
    """A collective that also notes the memory of what it gathers."""

    def __init__(self, collective: Collective, allocations: _Allocations) -> None:
        super().__init__(collective)
        self._allocations = allocations

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        gathered = super().all_gather(tensor)
        self._allocations.note(gathered)
        return gathered


@contextmanager
def allocations_beside(decoder: Decoder) -> Iterator[_Allocations]:
    """Measure the allocations within the block, on top of what `decoder` already holds."""
    with _Allocations() as allocations:
        allocations.note([decoder.cache.data, *decoder._memory.values()])
        yield allocations


@kinds
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize(("tp", "target_tp"), [(1, 2), (2, 1), (2, 4), (4, 2), (1, 4), (4, 1)])
def test_a_switch_takes_no_more_memory_than_was_foreseen_and_not_much_less(
    name: str, kind: str, tp: int, target_tp: int
) -> None:
    world = World(KINDS[kind], ARCHITECTURES[name], 4)
    meet = math.lcm(tp, target_tp)
    count = 6 * target_tp // tp if target_tp > tp else 6
    lists = [list(range(count)) for _ in range(meet // tp)]
    everything = [(replica, i, replica * count + i) for replica in range(meet // tp) for i in range(count)]
    config = world.config.model_copy(update={"dp": 4 // tp, "tp": tp})

    def work(number: int, group: GroupOf) -> int:
        rank = world.rank(number, tp, group)
        with allocations_beside(rank._decoder) as allocations:
            before = allocations.now()
            groups = {
                degree: group(degree) if degree == 1 else _Noted(group(degree), allocations)
                for degree in (tp, target_tp, meet)
            }
            rank.switch(Shard(number % target_tp, target_tp), [Migration(lists, everything)], groups.__getitem__)
        return allocations.most - before

    foreseen = switch_bytes(world.architecture, config, target_tp, count)
    for extra in world.run(work):
        assert 0.8 * foreseen < extra <= foreseen


@kinds
@pytest.mark.parametrize(("tp", "target_tp"), [(1, 2), (2, 1)])
def test_what_moves_among_all_ranks_takes_no_more_memory_than_was_foreseen(kind: str, tp: int, target_tp: int) -> None:
    world = World(KINDS[kind], ARCHITECTURES["biases"], 4)
    near = Migration([[0, 1, 2]] * (2 // tp), [(0, 0, 0), (0, 1, 1), (0, 2, 2)])
    across = Migration([[3, 4, 5]] * (4 // tp), [(index, 0, 3 + index) for index in range(4 // tp)])

    def work(number: int, group: GroupOf) -> int:
        rank = world.rank(number, tp, group)
        with allocations_beside(rank._decoder) as allocations:
            before = allocations.now()
            groups = {
                degree: group(degree) if degree == 1 else _Noted(group(degree), allocations) for degree in (1, 2, 4)
            }
            rank.switch(Shard(number % target_tp, target_tp), [near, across], groups.__getitem__)
        return allocations.most - before

    config = world.config.model_copy(update={"dp": 4 // tp, "tp": tp})
    foreseen = switch_bytes(world.architecture, config, target_tp, 3, 3)
    for extra in world.run(work):
        assert 0.6 * foreseen < extra <= foreseen


@pytest.mark.parametrize(
    ("migration", "message"),
    [
        (Migration([[0]], []), r"a migration has blocks of 1 replicas; 2 of TP 1 meet"),
        (Migration([[0], [10**6]], []), r"a migration names block 1000000; the cache has blocks 0 … \d+"),
        (Migration([[0], [1]], [(0, 0, -1)]), r"a migration names block -1; the cache has blocks 0 … \d+"),
        (Migration([[0], [1]], [(0, 1, 2)]), r"block number 1 of replica 0, which has no such one"),
        (Migration([[0], [1]], [(2, 0, 2)]), r"block number 0 of replica 2, which has no such one"),
        (Migration([[0], [1]], [(0, 0, 2), (1, 0, 2)]), r"a migration writes a block twice"),
    ],
)
def test_a_migration_that_cannot_be_is_refused_before_anything_changes(migration: Migration, message: str) -> None:
    world = World(KINDS["torch"], ARCHITECTURES["like SmolLM2"], 2)

    def work(number: int, group: GroupOf) -> None:
        rank = world.rank(number, 1, group)
        with pytest.raises(EngineError, match=message):
            rank.switch(Shard(number, 2), [migration], group)
        fresh = world.fresh(number, 1, group)
        assert_same_weights(rank._decoder, fresh)
        assert torch.equal(logits_of(rank._decoder, [0, 1], 4), logits_of(fresh, [0, 1], 4))

    world.run(work)


def test_a_shard_that_is_not_the_ranks_place_is_refused() -> None:
    world = World(KINDS["torch"], ARCHITECTURES["like SmolLM2"], 2)

    def work(number: int, group: GroupOf) -> None:
        with pytest.raises(EngineError, match=r"shard 0 of 1 cannot become shard \d of 2 as rank \d of 2 that meet"):
            world.rank(number, 1, group).switch(Shard(1 - number, 2), [empty_migration(2)], group)

    world.run(work)


def test_a_degree_that_the_model_cannot_have_is_refused() -> None:
    world = World(KINDS["torch"], small_architecture(**SIZES, query_heads=1, kv_heads=1), 2)

    def work(number: int, group: GroupOf) -> None:
        with pytest.raises(ModelError, match=r"tp 2 leaves ranks without a query head, the model has 1"):
            world.rank(number, 1, group).switch(Shard(number, 2), [empty_migration(2)], group)

    world.run(work)


def test_a_rank_that_is_alone_keeps_what_it_has() -> None:
    world = World(KINDS["torch"], ARCHITECTURES["like SmolLM2"], 1)
    check_path(world, [1, 1], seed=3)
