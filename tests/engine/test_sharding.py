"""Shards are equal in shape, and together they are the whole model."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.engine.model.shard import WHOLE, Shard
from tailrace.engine.model.sharding import (
    VOCAB_MULTIPLE,
    HeadSlot,
    Part,
    Piece,
    check_tp,
    cut_of,
    head_slots,
    local_architecture,
    pieces,
    shard_weights,
)
from tailrace.errors import ModelError
from tailrace.models.architecture import Architecture, parameter_shapes
from tests.engine.architectures import small_architecture

SMOLLM2 = small_architecture(query_heads=9, kv_heads=3, intermediate_size=1536, vocab_size=49152)
QWEN = small_architecture(query_heads=14, kv_heads=2, intermediate_size=4864, vocab_size=1000, qkv_bias=True)


@st.composite
def splits(draw: st.DrawFn) -> tuple[Architecture, int]:
    """Draw a model and a TP degree that it allows."""
    kv_heads = draw(st.integers(1, 6))
    query_heads = kv_heads * draw(st.integers(1, 5))
    architecture = small_architecture(
        layers=1,
        kv_heads=kv_heads,
        query_heads=query_heads,
        head_dim=2,
        hidden_size=3,
        intermediate_size=draw(st.integers(1, 200)),
        vocab_size=draw(st.integers(1, 1200)),
        tied=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        out_bias=draw(st.booleans()),
    )
    return architecture, draw(st.integers(1, query_heads))


def weights_of(architecture: Architecture) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {name: torch.rand(shape, generator=random) + 1 for name, shape in parameter_shapes(architecture).items()}


def shards_of(architecture: Architecture, tp: int) -> list[dict[str, torch.Tensor]]:
    named = weights_of(architecture)
    return [shard_weights(architecture, Shard(index, tp), named) for index in range(tp)]


@settings(max_examples=80)
@given(splits())
def test_all_shards_have_the_shapes_of_the_local_architecture(split: tuple[Architecture, int]) -> None:
    architecture, tp = split
    check_tp(architecture, tp)
    expected = parameter_shapes(local_architecture(architecture, tp))
    for shard in shards_of(architecture, tp):
        assert {name: tuple(tensor.shape) for name, tensor in shard.items()} == expected


@settings(max_examples=80)
@given(splits())
def test_every_query_head_is_computed_once_beside_its_own_kv_head(split: tuple[Architecture, int]) -> None:
    architecture, tp = split
    slots = [head_slots(architecture, Shard(index, tp)) for index in range(tp)]
    heads = [head for shard in slots for slot in shard for head in slot.query_heads]
    assert heads == list(range(architecture.query_heads))
    group = architecture.query_heads // architecture.kv_heads
    assert all(head // group == slot.kv_head for shard in slots for slot in shard for head in slot.query_heads)
    local = local_architecture(architecture, tp)
    assert all(len(shard) <= local.kv_heads for shard in slots)
    width = local.query_heads // local.kv_heads
    assert all(len(slot.query_heads) <= width for shard in slots for slot in shard)


@settings(max_examples=80)
@given(splits())
def test_the_shards_without_their_zeros_are_the_whole_model(split: tuple[Architecture, int]) -> None:
    architecture, tp = split
    named, shards = weights_of(architecture), shards_of(architecture, tp)
    for name, tensor in named.items():
        parts = [shard[name] for shard in shards]
        module = name.split(".")[-2]
        if module in ("k_proj", "v_proj"):  # a KV head may be on several shards
            parts = [part for part, keep in zip(parts, first_holders(architecture, tp), strict=True) if keep]
        if name.endswith("o_proj.bias"):
            assert torch.equal(sum(parts, torch.zeros_like(tensor)), tensor)
        elif "norm" in module:
            assert all(torch.equal(part, tensor) for part in parts)
        else:
            dimension = 1 if module in ("o_proj", "down_proj") else 0
            joined = torch.cat(parts, dimension).movedim(dimension, 0)
            held = joined.flatten(start_dim=1).any(1) if joined.ndim > 1 else joined != 0
            assert torch.equal(joined[held].movedim(0, dimension), tensor)


def first_holders(architecture: Architecture, tp: int) -> list[bool]:
    """For each shard, whether its KV heads are on no earlier shard."""
    seen: set[int] = set()
    first = []
    for index in range(tp):
        heads = {slot.kv_head for slot in head_slots(architecture, Shard(index, tp))}
        first.append(not heads & seen)
        seen |= heads
    return first


def vocab_range(architecture: Architecture, shard: Shard) -> tuple[int, int]:
    """The range of the shard's tokens, [start, stop); it may be empty."""
    cut = cut_of(architecture, shard, "lm_head.weight")
    assert cut is not None
    return cut[1].start, cut[1].stop


@settings(max_examples=80)
@given(splits())
def test_every_token_is_on_one_shard_and_shards_begin_at_whole_blocks(split: tuple[Architecture, int]) -> None:
    architecture, tp = split
    width = local_architecture(architecture, tp).vocab_size
    assert width % VOCAB_MULTIPLE == 0
    ranges = [vocab_range(architecture, Shard(index, tp)) for index in range(tp)]
    assert [token for start, stop in ranges for token in range(start, stop)] == list(range(architecture.vocab_size))
    assert all(start == index * width for index, (start, stop) in enumerate(ranges) if start < stop)


def test_smollm2_has_its_heads_on_two_ranks_by_padding() -> None:
    local = local_architecture(SMOLLM2, 2)
    assert (local.query_heads, local.kv_heads, local.intermediate_size, local.vocab_size) == (6, 2, 768, 24576)
    assert head_slots(SMOLLM2, Shard(0, 2)) == [HeadSlot(0, range(3)), HeadSlot(1, range(3, 6))]
    assert head_slots(SMOLLM2, Shard(1, 2)) == [HeadSlot(2, range(6, 9))]


def test_qwens_two_kv_heads_are_on_two_ranks_each_of_four() -> None:
    local = local_architecture(QWEN, 4)
    assert (local.query_heads, local.kv_heads) == (4, 1)
    slots = [slot for index in range(4) for slot in head_slots(QWEN, Shard(index, 4))]
    assert [slot.kv_head for slot in slots] == [0, 0, 1, 1]
    assert [len(slot.query_heads) for slot in slots] == [4, 3, 4, 3]


@settings(max_examples=80)
@given(splits(), st.data())
def test_pieces_of_the_shards_of_one_degree_make_up_those_of_another(
    split: tuple[Architecture, int], data: st.DataObject
) -> None:
    architecture, tp = split
    target_tp = data.draw(st.integers(1, architecture.query_heads))
    own = data.draw(st.integers(0, tp - 1))
    shards, wanted = shards_of(architecture, tp), shards_of(architecture, target_tp)
    for name in weights_of(architecture):
        cuts = [cut_of(architecture, Shard(index, tp), name) for index in range(tp)]
        for index in range(target_tp):
            needed = cut_of(architecture, Shard(index, target_tp), name)
            if needed is None:
                assert torch.equal(wanted[index][name], shards[own][name])
                continue
            dimension, part = needed
            made = torch.zeros_like(wanted[index][name])
            for piece in pieces([cut[1] for cut in cuts if cut is not None], part, own):
                taken = shards[piece.source][name].narrow(dimension, piece.start, piece.length)
                made.narrow(dimension, piece.target, piece.length).copy_(taken)
            assert torch.equal(made, wanted[index][name])


def test_two_shards_of_smollm2_make_up_the_whole_without_the_zero_head() -> None:
    held = [cut[1] for index in (0, 1) if (cut := cut_of(SMOLLM2, Shard(index, 2), "k_proj.weight"))]
    assert pieces(held, Part(0, 12, 12), 1) == [Piece(0, 0, 0, 8), Piece(1, 0, 8, 4)]
    assert pieces([Part(0, 12, 12)], held[1], 0) == [Piece(0, 8, 0, 4)]


def test_a_piece_that_several_shards_have_comes_from_the_own_one() -> None:
    held = [cut[1] for index in range(4) if (cut := cut_of(QWEN, Shard(index, 4), "v_proj.weight"))]
    assert [part.start for part in held] == [0, 0, 4, 4]
    assert pieces(held, Part(0, 4, 4), 1) == [Piece(1, 0, 0, 4)]
    assert pieces(held, Part(4, 8, 4), 1) == [Piece(2, 0, 0, 4)]
    assert pieces(held, Part(8, 8, 4), 1) == []


def test_the_bias_of_the_out_projection_is_on_the_first_shard_alone() -> None:
    biased = small_architecture(out_bias=True)
    cuts = [cut_of(biased, Shard(index, 2), "model.layers.1.self_attn.o_proj.bias") for index in (0, 1)]
    assert cuts == [(0, Part(0, 8, 8)), (0, Part(0, 0, 8))]


def test_parts_that_need_no_padding_are_views() -> None:
    architecture = small_architecture(vocab_size=1024, intermediate_size=64, query_heads=4)
    named = weights_of(architecture)
    for index in range(2):
        for name, part in shard_weights(architecture, Shard(index, 2), named).items():
            assert part.untyped_storage().data_ptr() == named[name].untyped_storage().data_ptr(), name


def test_one_shard_is_the_model_but_for_padding() -> None:
    assert local_architecture(SMOLLM2, 1) == SMOLLM2
    padded = local_architecture(QWEN, 1)
    assert padded == dataclasses.replace(QWEN, vocab_size=1024)
    assert vocab_range(QWEN, WHOLE) == (0, 1000)


def test_more_ranks_than_query_heads_are_refused() -> None:
    check_tp(SMOLLM2, 9)
    message = r"tp 10 leaves ranks without a query head, the model has 9; set engine\.tp to 9 or less"
    with pytest.raises(ModelError, match=message):
        check_tp(SMOLLM2, 10)
