"""The tensors that `update_weights` takes: full ones, or shards that cover them."""

import itertools
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.engine.model.weights import TensorShard, Weights, check_weights
from tailrace.errors import EngineError
from tailrace.models.architecture import parameter_shapes
from tests.engine.architectures import small_architecture

ARCHITECTURE = small_architecture(qkv_bias=True)
EMBEDDING = "model.embed_tokens.weight"


def full_weights() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=random) for name, shape in parameter_shapes(ARCHITECTURE).items()}


def with_shards(*shards: TensorShard) -> Weights:
    """Full tensors, but for the embedding, [10, 8], which comes as `shards`."""
    for name, tensor in full_weights().items():
        if name == EMBEDDING:
            yield from ((name, shard) for shard in shards)
        else:
            yield name, tensor


def shard(rows: slice, columns: slice = slice(0, 8), *, dtype: torch.dtype = torch.float32) -> TensorShard:
    return TensorShard(full_weights()[EMBEDDING][rows, columns].to(dtype), (rows.start, columns.start))


@settings(max_examples=40)
@given(st.data())
def test_shards_in_any_order_make_the_parameter_that_they_were_cut_from(data: st.DataObject) -> None:
    pieces: list[tuple[str, torch.Tensor | TensorShard]] = []
    for name, tensor in full_weights().items():
        cuts = [sorted({0, size, *data.draw(st.sets(st.integers(0, size), max_size=2))}) for size in tensor.shape]
        for box in itertools.product(*(itertools.pairwise(cut) for cut in cuts)):
            part = tensor[tuple(slice(*side) for side in box)]
            pieces.append((name, TensorShard(part, tuple(start for start, _ in box))))
    named = check_weights(ARCHITECTURE, data.draw(st.permutations(pieces)))
    assert named.keys() == full_weights().keys()
    assert all(torch.equal(named[name], tensor) for name, tensor in full_weights().items())


def test_a_shard_without_elements_is_harmless() -> None:
    named = check_weights(ARCHITECTURE, with_shards(shard(slice(0, 10)), shard(slice(4, 4))))
    assert torch.equal(named[EMBEDDING], full_weights()[EMBEDDING])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_head_of_a_tied_model_that_is_another_one_is_refused(dtype: torch.dtype) -> None:
    weights = full_weights()
    other = weights[EMBEDDING].to(dtype, copy=True)
    other[9, 7] += 1
    with pytest.raises(EngineError, match=r"lm_head\.weight has other numbers than model\.embed_tokens\.weight"):
        check_weights(ARCHITECTURE, [("lm_head.weight", other), *weights.items()])


def test_the_head_of_a_tied_model_may_come_along() -> None:
    weights = full_weights()
    named = check_weights(ARCHITECTURE, [*weights.items(), ("lm_head.weight", weights[EMBEDDING])])
    assert named.keys() == weights.keys()


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([shard(slice(0, 4)), shard(slice(6, 10))], r"cover 64 of its 80 elements; send all"),
        ([shard(slice(4, 4))], r"cover 0 of its 80 elements"),
        ([], r"1 weights are missing, such as model\.embed_tokens\.weight"),
        ([shard(slice(0, 6)), shard(slice(4, 10))], r"overlapping shards at \[0:6, 0:8\] and \[4:10, 0:8\]"),
        ([TensorShard(torch.zeros(4, 8), (8, 0))], r"a shard at \[8:12, 0:8\], outside of its shape \(10, 8\)"),
        ([TensorShard(torch.zeros(4, 8), (-1, 0))], r"a shard at \[-1:3, 0:8\], outside of its shape \(10, 8\)"),
        ([TensorShard(torch.zeros(80), (0,))], r"a shard \(80,\) at \(0,\); the model has \(10, 8\)"),
        ([shard(slice(0, 10), dtype=torch.int8)], r"has dtype torch\.int8; weights are floating-point numbers"),
        (
            [shard(slice(0, 4)), shard(slice(4, 10), dtype=torch.bfloat16)],
            r"shards of torch\.float32 and torch\.bfloat16; use one dtype",
        ),
    ],
)
def test_shards_that_do_not_make_the_parameter_are_refused(shards: list[TensorShard], message: str) -> None:
    with pytest.raises(EngineError, match=message) as caught:
        check_weights(ARCHITECTURE, with_shards(*shards))
    assert EMBEDDING in str(caught.value)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (torch.zeros(10, 8, device="meta"), r"is a torch\.strided tensor on meta; weights are dense and have data"),
        (torch.zeros(10, 8).to_sparse(), r"is a torch\.sparse_coo tensor on cpu; weights are dense"),
        (np.zeros((10, 8), np.float32), r"is a ndarray; weights are torch tensors"),
        (None, r"is a NoneType; weights are torch tensors"),
    ],
    ids=["meta", "sparse", "numpy", "none"],
)
@pytest.mark.parametrize("whole", [True, False])
def test_what_is_no_tensor_with_data_is_refused(other: Any, message: str, whole: bool) -> None:
    item = other if whole else TensorShard(other, (0, 0))
    with pytest.raises(EngineError, match=rf"{re.escape(EMBEDDING)} {message}"):
        check_weights(ARCHITECTURE, [(EMBEDDING, item)])


def test_full_tensors_that_are_not_the_models_are_refused() -> None:
    weights = full_weights()
    tensor = weights[EMBEDDING]
    changes: list[tuple[list[tuple[str, torch.Tensor | TensorShard]], str]] = [
        ([("model.embedding.weight", tensor)], r"no weight 'model\.embedding\.weight'; use its HF names"),
        ([(EMBEDDING, tensor)], r"comes twice; send each weight once"),
        ([(EMBEDDING, TensorShard(tensor, (0, 0)))], r"comes twice; send each weight once"),
    ]
    for extra, message in changes:
        with pytest.raises(EngineError, match=message):
            check_weights(ARCHITECTURE, [*weights.items(), *extra])
    with pytest.raises(EngineError, match=r"comes twice, whole and as shards"):
        check_weights(ARCHITECTURE, [(EMBEDDING, TensorShard(tensor, (0, 0))), *weights.items()])
    with pytest.raises(EngineError, match=r"has shape \(8, 10\); the model has \(10, 8\)"):
        check_weights(ARCHITECTURE, (weights | {EMBEDDING: tensor.T}).items())
    with pytest.raises(EngineError, match=r"has dtype torch\.int64; weights are floating-point numbers"):
        check_weights(ARCHITECTURE, (weights | {EMBEDDING: tensor.long()}).items())
