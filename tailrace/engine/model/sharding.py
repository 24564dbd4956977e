"""The part of the model that each tensor-parallel shard holds.

Every shard has the same shapes, so each part is a range of a dimension followed by zeros up to the common size. Zeros
change no result: a zero query head meets zero columns of the out projection, a zero MLP column gives silu(0) · 0, and
the sampler masks what lies beyond the vocabulary.

Attention is split by KV heads. Where there are more shards than KV heads, a KV head is kept on several shards, and its
query heads are split among those. The out and down projections give partial sums, which are added up over the shards
(Shoeybi et al. 2019, Megatron-LM, section 3).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tailrace.engine.model.shard import Shard
from tailrace.errors import ModelError
from tailrace.models.architecture import Architecture

VOCAB_MULTIPLE = 256
"""The vocabulary entries of a shard are a multiple of this: the sampler's blocks must not depend on the degree."""
MLP_MULTIPLE = 32
"""The MLP columns of a shard are a multiple of this: whole vectors for the kernels."""


@dataclass(frozen=True, slots=True)
class Part:
    """Entries start … stop - 1 of a dimension, then zeros up to `size`."""

    start: int
    stop: int
    size: int

    def of(self, tensor: torch.Tensor, dimension: int) -> torch.Tensor:
        """Return the part of `tensor` along `dimension`; a view unless zeros have to be added."""
        held = tensor.narrow(dimension, self.start, self.stop - self.start)
        missing = self.size - (self.stop - self.start)
        return F.pad(held, [0, 0] * (tensor.ndim - 1 - dimension) + [0, missing]) if missing else held


@dataclass(frozen=True, slots=True)
class Piece:
    """Entries of a dimension that a shard takes from a shard of another degree."""

    source: int
    """The index of the shard that has them."""
    start: int
    """The position where they begin in that shard."""
    target: int
    """The position where they begin in the shard that takes them."""
    length: int


@dataclass(frozen=True, slots=True)
class HeadSlot:
    """The contents of one of a shard's KV heads."""

    kv_head: int
    """The KV head's number in the whole model."""
    query_heads: range
    """The numbers of `kv_head`'s query heads that this shard computes. Empty where other shards have them all."""


def check_tp(architecture: Architecture, tp: int) -> None:
    """Check that the model can be split into `tp` shards.

    Raises:
        ModelError: there are more shards than query heads.
    """
    if tp > architecture.query_heads:
        raise ModelError(
            f"tp {tp} leaves ranks without a query head, the model has {architecture.query_heads}; "
            f"set engine.tp to {architecture.query_heads} or less"
        )


def local_architecture(architecture: Architecture, degree: int) -> Architecture:
    """The shapes of one of `degree` shards, the same on all of them. They include padding, even for one shard."""
    shard = Shard(0, degree)
    kv_heads = _slots(architecture, degree)
    return dataclasses.replace(
        architecture,
        query_heads=kv_heads * _queries_per_slot(architecture, degree),
        kv_heads=kv_heads,
        intermediate_size=_mlp(architecture, shard).size,
        vocab_size=_vocabulary(architecture, shard).size,
    )


def head_slots(architecture: Architecture, shard: Shard) -> list[HeadSlot]:
    """The contents of the shard's KV heads, in order. There may be further, zero heads (see `local_architecture`)."""
    replicas, slots = _replicas(architecture, shard.degree), _slots(architecture, shard.degree)
    first = min(shard.index * slots, architecture.kv_heads * replicas)
    last = min(first + slots, architecture.kv_heads * replicas)
    return [_slot(architecture, place // replicas, place % replicas, shard.degree) for place in range(first, last)]


def shard_weights(
    architecture: Architecture, shard: Shard, named: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the shard's part of each of these full tensors, under the same HF names; views where nothing is padded.

    The bias of the out projection is shard 0's, and zero on the others: it must be added once.
    """
    cuts = _cuts(architecture, shard)
    shards = {}
    for name, tensor in named.items():
        dimension, part = _cut(name, cuts, shard, architecture.hidden_size) or (0, Part(0, len(tensor), len(tensor)))
        shards[name] = part.of(tensor, dimension)
    return shards


def cut_of(architecture: Architecture, shard: Shard, name: str) -> tuple[int, Part] | None:
    """The dimension in which the parameter `name` is split, and the shard's part; None where all have it whole."""
    return _cut(name, _cuts(architecture, shard), shard, architecture.hidden_size)


def pieces(sources: Sequence[Part], target: Part, own: int) -> list[Piece]:
    """Find the pieces that make up `target` except for its zeros, in order.

    sources: The parts of the shards of another degree.
    own: A source that is preferred where several have the same, as several shards may have a KV head.
    """
    found: list[Piece] = []
    position = target.start
    while position < target.stop:
        holders = [index for index, part in enumerate(sources) if part.start <= position < part.stop]
        assert holders, f"no shard holds entry {position}"
        source = own if own in holders else holders[0]
        part = sources[source]
        length = min(part.stop, target.stop) - position
        found.append(Piece(source, position - part.start, position - target.start, length))
        position += length
    return found


def _cut(name: str, cuts: Mapping[str, tuple[int, Part]], shard: Shard, hidden_size: int) -> tuple[int, Part] | None:
    module, kind = name.split(".")[-2:]
    if module == "o_proj" and kind == "bias":
        return 0, Part(0, hidden_size if shard.index == 0 else 0, hidden_size)
    return cuts.get(module)


def _cuts(architecture: Architecture, shard: Shard) -> dict[str, tuple[int, Part]]:
    """The modules whose weights are split, with the dimension and the part of it."""
    query, kv = _heads(architecture, shard)
    mlp, vocabulary = _mlp(architecture, shard), _vocabulary(architecture, shard)
    return {
        "embed_tokens": (0, vocabulary),
        "lm_head": (0, vocabulary),
        "q_proj": (0, query),
        "k_proj": (0, kv),
        "v_proj": (0, kv),
        "o_proj": (1, query),
        "gate_proj": (0, mlp),
        "up_proj": (0, mlp),
        "down_proj": (1, mlp),
    }


def _heads(architecture: Architecture, shard: Shard) -> tuple[Part, Part]:
    """Rows of the query and of the key and value projections. The heads of neighbouring slots are neighbours."""
    local, slots = local_architecture(architecture, shard.degree), head_slots(architecture, shard)
    queries = [head for slot in slots for head in slot.query_heads] or [0]
    kv_start = slots[0].kv_head if slots else 0
    query_count = sum(len(slot.query_heads) for slot in slots)
    d = architecture.head_dim
    return (
        Part(queries[0] * d, (queries[0] + query_count) * d, local.query_heads * d),
        Part(kv_start * d, (kv_start + len(slots)) * d, local.kv_heads * d),
    )


def _mlp(architecture: Architecture, shard: Shard) -> Part:
    return _even(architecture.intermediate_size, shard, MLP_MULTIPLE)


def _vocabulary(architecture: Architecture, shard: Shard) -> Part:
    return _even(architecture.vocab_size, shard, VOCAB_MULTIPLE)


def _even(total: int, shard: Shard, multiple: int) -> Part:
    """The shard's part of `total` entries. All parts have the same size, a multiple of `multiple`."""
    size = -(-total // (shard.degree * multiple)) * multiple
    start = min(shard.index * size, total)
    return Part(start, min(start + size, total), size)


def _slot(architecture: Architecture, kv_head: int, replica: int, degree: int) -> HeadSlot:
    group = architecture.query_heads // architecture.kv_heads
    width = _queries_per_slot(architecture, degree)
    first, last = (min(place * width, group) for place in (replica, replica + 1))
    return HeadSlot(kv_head, range(kv_head * group + first, kv_head * group + last))


def _replicas(architecture: Architecture, degree: int) -> int:
    """The number of shards that hold the same KV head."""
    return max(1, degree // architecture.kv_heads)


def _slots(architecture: Architecture, degree: int) -> int:
    """The number of KV heads of a shard."""
    return -(-architecture.kv_heads // degree)


def _queries_per_slot(architecture: Architecture, degree: int) -> int:
    group = architecture.query_heads // architecture.kv_heads
    return -(-group // _replicas(architecture, degree))
