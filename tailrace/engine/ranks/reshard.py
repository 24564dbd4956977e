"""The work of a rank in a switch: its weights and its cache become those of a shard of another degree.

    for each group of weights    own shard has all? ── yes ──▶ slice
                                     └─ no ──▶ all_gather over the old replica ──▶ slice
    for each layer of the cache  blocks in use ──▶ all_gather over the ranks that meet ──▶ slice heads ──▶ same memory
                                 blocks of sequences that go further ──▶ all_gather over all ranks ──▶ the same

Weights come from the ranks themselves, in the format in which they compute (PAT, section 4.3): nothing is read,
converted or rounded. Old and new weights exist together for one group at a time. The new cache lies where the old one
does. What a rank needs of a layer's old bytes is copied out before the first of them is overwritten.

The ranks that *meet* are lcm(old degree, new degree) neighbours: whole replicas of both arrangements. Where sequences
leave these, all ranks meet a second time. All ranks of the engine make the same calls in the same order.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from tailrace.config.engine import NativeEngineConfig
from tailrace.engine.collectives.base import Collective
from tailrace.engine.decoder.base import Decoder, Ints
from tailrace.engine.decoder.packing import Group, Packing, RowMajor
from tailrace.engine.kv_cache import DTYPES, KVCache, region_block_bytes
from tailrace.engine.model.shard import Shard
from tailrace.engine.model.sharding import Piece, cut_of, head_slots, local_architecture, pieces
from tailrace.engine.scheduling.migration import Migration
from tailrace.errors import EngineError
from tailrace.host.compute import now
from tailrace.models.architecture import Architecture


class SwitchTimes(msgspec.Struct, frozen=True, array_like=True):
    """The seconds and bytes of a switch on one rank."""

    weights_s: float
    kv_s: float
    kv_bytes: int
    """Bytes of keys and values that the rank put into exchanges."""


class Meeting:
    """The ranks that exchange in a switch, seen from one of them."""

    def __init__(self, source: Shard, target: Shard, *, replica: Collective, everyone: Collective) -> None:
        """Check that the parts fit together.

        Args:
            source, target: The shard that the rank holds, and the one that it will hold.
            replica: The collective of the rank's old replica.
            everyone: The collective of the ranks that meet: lcm(source.degree, target.degree), or all of the engine.

        Raises:
            EngineError: the rank is not at the place that belongs to its shards.
        """
        self.source, self.target = source, target
        self.replica, self.everyone = replica, everyone
        self.size = everyone.size
        whole = self.size % math.lcm(source.degree, target.degree) == 0
        places = {replica.rank, everyone.rank % source.degree}, {everyone.rank % target.degree}
        if places != ({source.index}, {target.index}) or replica.size != source.degree or not whole:
            raise EngineError(
                f"shard {source.index} of {source.degree} cannot become shard {target.index} of {target.degree} as "
                f"rank {everyone.rank} of {everyone.size} that meet and {replica.rank} of {replica.size} of its "
                "replica; number ranks replica · tp + shard"
            )

    def becomes(self, index: int) -> Shard:
        """The shard that shard `index` of the old replica becomes."""
        first = self.everyone.rank - self.source.index
        return Shard((first + index) % self.target.degree, self.target.degree)


def check_migrations(migrations: Sequence[Migration], meetings: Sequence[Meeting], old: KVCache, new: KVCache) -> None:
    """Check that the blocks that the migrations name exist.

    Raises:
        EngineError: a block does not exist, or is written twice.
    """
    for migration, meeting in zip(migrations, meetings, strict=True):
        _check_migration(migration, meeting, old, new)
    written = [block for migration in migrations for _, _, block in migration.targets]
    if len(set(written)) < len(written):
        raise EngineError("a migration writes a block twice; give each block that moves one of its own")


def _check_migration(migration: Migration, meeting: Meeting, old: KVCache, new: KVCache) -> None:
    sources, targets = migration.sources, [block for _, _, block in migration.targets]
    if len(sources) != meeting.size // meeting.source.degree:
        raise EngineError(
            f"a migration has blocks of {len(sources)} replicas; {meeting.size // meeting.source.degree} of TP "
            f"{meeting.source.degree} meet"
        )
    for blocks, cache in (([block for source in sources for block in source], old), (targets, new)):
        outside = [block for block in blocks if not 0 <= block < cache.blocks]
        if outside:
            raise EngineError(f"a migration names block {outside[0]}; the cache has blocks 0 … {cache.blocks - 1}")
    for replica, position, _ in migration.targets:
        if not 0 <= replica < len(sources) or not 0 <= position < len(sources[replica]):
            raise EngineError(f"a migration moves block number {position} of replica {replica}, which has no such one")


class WeightMove:
    """Fills the groups of a decoder of another degree."""

    def __init__(self, architecture: Architecture, meeting: Meeting) -> None:
        """Start without plans. `architecture` is that of the whole model."""
        self._architecture = architecture
        self._meeting = meeting
        self._plans: dict[str, _Plan] = {}

    def run(self, group: Group, old: Decoder, new: Decoder) -> None:
        """Take the group from `old` and give it to `new`."""
        own = self._meeting.source.index
        held = old.give_up(group)
        device = held.device
        if self._exchanges(list(old.packing.parts(group, held))):
            gathered = self._meeting.replica.all_gather(held)
            del held  # its memory may serve the new group
            sources = {index: old.packing.parts(group, memory) for index, memory in enumerate(gathered)}
        else:
            sources = {own: old.packing.parts(group, held)}
        memory = new.packing.make(group, device)
        for name, part in new.packing.parts(group, memory).items():
            _fill(part, self._plan(name), {index: parts[name] for index, parts in sources.items()}, own)
        new.adopt(group, memory)

    def _exchanges(self, names: Sequence[str]) -> bool:
        """Whether a rank of the old replica lacks something. Then all ranks take part, and all ranks know it."""
        return any(self._plan(name).exchanges for name in names)

    def _plan(self, name: str) -> "_Plan":
        kind = ".".join(name.split(".")[-2:])  # layers do not differ
        if kind not in self._plans:
            self._plans[kind] = _Plan.of(self._architecture, self._meeting, name)
        return self._plans[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The plan by which one parameter is put together."""

    split: bool
    """Whether shards differ; if not, the rank has the whole parameter."""
    exchanges: bool
    """Whether a rank of the old replica needs what another one has."""
    dimension: int = 0
    size: int = 0
    """The entries of the new shard along the dimension."""
    pieces: Sequence[Piece] = ()

    @classmethod
    def of(cls, architecture: Architecture, meeting: Meeting, name: str) -> "_Plan":
        degree = meeting.source.degree
        cuts = [cut_of(architecture, Shard(index, degree), name) for index in range(degree)]
        held = [cut[1] for cut in cuts if cut is not None]
        if not held:
            return cls(split=False, exchanges=False)
        needs = []
        for index in range(degree):
            needed = cut_of(architecture, meeting.becomes(index), name)
            assert needed is not None, "what one degree splits, all do"
            needs.append((needed, pieces(held, needed[1], index)))
        (dimension, part), own = needs[meeting.source.index]
        lacking = (piece.source != index for index, (_, taken) in enumerate(needs) for piece in taken)
        return cls(split=True, exchanges=any(lacking), dimension=dimension, size=part.size, pieces=own)


def _fill(part: torch.Tensor, plan: _Plan, sources: Mapping[int, torch.Tensor], own: int) -> None:
    """Copy the pieces into `part`, and fill the rest with zeros."""
    if not plan.split:
        part.copy_(sources[own])
        return
    grain = plan.size // part.shape[plan.dimension]
    end = 0
    for piece in plan.pieces:
        assert piece.start % grain == piece.target % grain == 0, "shards are cut at whole grains"
        length = -(-piece.length // grain)  # the model may end within a grain; zeros follow in its shard
        start, end = piece.target // grain, piece.target // grain + length
        taken = sources[piece.source].narrow(plan.dimension, piece.start // grain, length)
        part.narrow(plan.dimension, start, length).copy_(taken)
    part.narrow(plan.dimension, end, part.shape[plan.dimension] - end).zero_()


class CacheMove:
    """Moves the blocks of a migration, layer by layer, from one shape of the cache to another in the same memory."""

    def __init__(
        self, architecture: Architecture, meeting: Meeting, migration: Migration, old: KVCache, new: KVCache
    ) -> None:
        """Find the blocks that move. `architecture` is that of the whole model."""
        self._everyone = meeting.everyone
        self._old, self._new = old.data, new.data
        self._longest = max(map(len, migration.sources), default=0)
        blocks = migration.sources[meeting.everyone.rank // meeting.source.degree]
        device = old.data.device
        # Every rank sends the same number of blocks. Where it has fewer, any block will do.
        sent = torch.tensor(blocks + [0] * (self._longest - len(blocks)), dtype=torch.int64)
        self._own = torch.cat((sent, old.blocks + sent)).to(device)
        rows = _rows(architecture, meeting, migration, self._old.shape, self._new.shape)
        self._from, self._to, self._zero = (torch.from_numpy(array).to(device) for array in rows)

    @property
    def sent_bytes(self) -> int:
        """Bytes that the rank sends, of all layers."""
        _, _, heads, size = self._old[0].shape
        return len(self._old) * 2 * self._longest * int(heads * size) * self._old.dtype.itemsize

    def gather(self, layer: int) -> torch.Tensor | None:
        """Return the blocks of a layer that move, of all ranks; None where none does."""
        if not self._longest:
            return None
        return self._everyone.all_gather(_words(self._old[layer].flatten(0, 1)).index_select(0, self._own))

    def put(self, layer: int, gathered: torch.Tensor) -> None:
        """Write the rank's part of them to its new cache."""
        rows = _words(self._new[layer].flatten(0, 2))
        rows.index_copy_(0, self._to, gathered.view(-1, rows.shape[1]).index_select(0, self._from))
        rows.index_fill_(0, self._zero, 0)


def _words(rows: torch.Tensor) -> torch.Tensor:
    """View the same memory, [rows, X], as numbers of 4 bytes, which torch puts in place quicker than those of 2."""
    return rows.flatten(1).view(torch.int32)


def _rows(
    architecture: Architecture, meeting: Meeting, migration: Migration, old: Sequence[int], new: Sequence[int]
) -> tuple[Ints, Ints, Ints]:
    """Find the rows to take from what is gathered, the rows of a layer to put them in, and the rows that become zero.

    A row is the vectors of one block and head. `old` and `new` are the shapes of the caches.
    """
    replica_M, place_M, block_M = np.array(migration.targets, np.int64).reshape(-1, 3).T
    longest = max(map(len, migration.sources), default=0)
    (_, _, _, old_heads, _), (_, _, new_blocks, new_heads, _) = old, new
    holders = _holders(architecture, meeting.source.degree)
    wanted = [slot.kv_head for slot in head_slots(architecture, meeting.target)]
    none = np.zeros(0, np.int64)
    sources, targets, zeros = [none], [none], [none]
    for part in (0, 1):
        to_M = (part * new_blocks + block_M) * new_heads
        for slot, head in enumerate(wanted):
            shard, place = holders[head]
            member_M = replica_M * meeting.source.degree + shard
            sources.append(((member_M * 2 + part) * longest + place_M) * old_heads + place)
            targets.append(to_M + slot)
        zeros += [to_M + slot for slot in range(len(wanted), new_heads)]
    return np.concatenate(sources), np.concatenate(targets), np.concatenate(zeros)


def _holders(architecture: Architecture, degree: int) -> dict[int, tuple[int, int]]:
    """A shard that has each KV head, and the head's slot there."""
    return {
        slot.kv_head: (index, place)
        for index in reversed(range(degree))
        for place, slot in enumerate(head_slots(architecture, Shard(index, degree)))
    }


def reshard(
    architecture: Architecture, meetings: Sequence[Meeting], migrations: Sequence[Migration], old: Decoder, new: Decoder
) -> SwitchTimes:
    """Move all weights, and the blocks of the migrations, from `old` to `new`, which was made by its `reshaped`.

    Args:
        meetings: The ranks that meet for each migration. Those of the first exchange weights, too.

    Raises:
        EngineError: a migration is not possible, and nothing has changed; or a rank did not take part, and both
            decoders are of no further use.
    """
    check_migrations(migrations, meetings, old.cache, new.cache)
    device = old.cache.data.device
    weights = WeightMove(architecture, meetings[0])
    caches = [
        CacheMove(architecture, meeting, migration, old.cache, new.cache)
        for meeting, migration in zip(meetings, migrations, strict=True)
    ]
    weights_s = kv_s = 0.0
    last = now(device)
    for group in old.packing.groups:
        weights.run(group, old, new)
        moved = now(device)
        if not isinstance(group, str):
            _move_layer(caches, group)
        ended = now(device)
        weights_s, kv_s, last = weights_s + moved - last, kv_s + ended - moved, ended
    return SwitchTimes(weights_s, kv_s, sum(cache.sent_bytes for cache in caches))


def _move_layer(caches: Sequence[CacheMove], layer: int) -> None:
    """Gather first what moves in any way, since what is put in place overwrites old blocks."""
    moving = [(cache, gathered) for cache in caches for gathered in [cache.gather(layer)] if gathered is not None]
    for cache, gathered in moving:
        cache.put(layer, gathered)


def switch_bytes(
    architecture: Architecture, config: NativeEngineConfig, target_tp: int, blocks: int, across: int = 0
) -> int:
    """The most memory, in bytes, that a rank takes for a switch from `config.tp` to `target_tp`, beside what it has.

    This is an upper bound of what the switch allocates. What decoders allocate when they first compute is not in it.

    Args:
        architecture: The architecture of the whole model.
        blocks: The blocks that move from the old replica that has most of them.
        across: The same of blocks that move among all ranks of the engine.
    """
    dtype, tp = DTYPES[config.dtype], config.tp
    old, new = local_architecture(architecture, tp), local_architecture(architecture, target_tp)
    # No decoder stores vectors wider than this, and all store matrices in the configured dtype.
    packings = [Packing(local, RowMajor(dtype, torch.float32)) for local in (old, new)]
    meet, ranks = math.lcm(tp, target_tp), config.ranks
    old_block, new_block = (region_block_bytes(local, config.block_size, dtype) for local in (old, new))
    arriving = [meet // tp * blocks, ranks // tp * across]
    # The rank releases what it sends when all is gathered; slices are taken after that.
    gathered = (meet * blocks + ranks * across) * old_block
    cache_bytes = gathered + max(max(blocks, across) * old_block, max(arriving) * new_block)
    held = most = 0
    for group in packings[0].groups:
        before, after = (packing.size(group) for packing in packings)
        # The old group makes room for the new one, unless the new one takes its slices from it.
        most = max(most, held + (after if tp == 1 else tp * before + max(0, after - before)))
        held += after - before
        if not isinstance(group, str):
            most = max(most, held + cache_bytes)
    places = 2 * (blocks + across) + 2 * 2 * sum(arriving) * new.kv_heads
    return most + places * torch.int64.itemsize
