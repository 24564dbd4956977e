"""What a forward pass computes, reads and exchanges, operator by operator, on one of its TP ranks.

A pass has m tokens. Each of them attends to the cached tokens of its own sequence; `pairs` counts these for all of
them together. Tokens that decode have one query each: their attention reads the whole cache for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tailrace.planning.model_shape.base import Experts, ModelShape

Kind = Literal["product", "grouped", "attention", "memory", "exchange", "dispatch"]

ATTENTION_LAUNCHES = 5
"""Kernels of attention: rotation, norms, writing the cache, and the combination of parts of a context."""
PROMPT_LAUNCHES = 16
"""Kernels that attention of prompts costs besides: it is launched by the host, outside of a graph."""
EXPERT_LAUNCHES = 12
"""Kernels of the experts of a layer: choosing, sorting, two grouped products, and adding up."""
SKEW = 0.5
"""The busiest of n ranks with experts has n ** SKEW times the tokens of the mean one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator, and how often a pass has it."""

    kind: Kind
    name: str
    flops: float = 0.0
    read_bytes: float = 0.0
    """Bytes of memory that are read and written."""
    exchanged_bytes: float = 0.0
    """Bytes of the tensor that all ranks sum up; of a dispatch, that they gather and later sum up."""
    count: float = 1.0
    launches: float = 1.0
    """Kernels, each of which takes time beside its work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The work of one forward pass."""

    tokens: float
    """m, of all sequences."""
    pairs: float
    """Pairs of a token and a token that it attends to."""
    cached_tokens: float
    """Cached tokens whose keys and values are read."""
    logits: float
    """Tokens whose logits are computed."""


NOTHING = Pass(tokens=0.0, pairs=0.0, cached_tokens=0.0, logits=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharers:
    """Replicas that compute attention by themselves and share the experts out: expert parallelism over DP ranks."""

    replicas: int = 1
    tokens: float
    """m, of all of them."""


def decode(batch_size: float, context_tokens: float) -> Pass:
    """A decode step of `batch_size` sequences with so many cached tokens together."""
    return Pass(tokens=batch_size, pairs=context_tokens, cached_tokens=context_tokens, logits=batch_size)


def prefill(sequences: float, length: float, *, cached: float = 0.0, logits: float | None = None) -> Pass:
    """A pass over `length` tokens of each sequence after `cached` tokens of it.

    `logits`: tokens whose logits are computed; by default the last of each sequence.
    """
    return Pass(
        tokens=sequences * length,
        pairs=sequences * (length * length / 2 + length * cached),
        cached_tokens=sequences * (length + cached),
        logits=sequences if logits is None else logits,
    )


def joined(*parts: Pass) -> Pass:
    """One pass over the tokens of several, as with chunked prefill."""
    return Pass(
        tokens=sum(part.tokens for part in parts),
        pairs=sum(part.pairs for part in parts),
        cached_tokens=sum(part.cached_tokens for part in parts),
        logits=sum(part.logits for part in parts),
    )


def vector_bytes(element_bytes: float) -> float:
    """Bytes of an element of vectors between products whose weights have `element_bytes`: 2 where these have fewer."""
    return max(2.0, element_bytes)


def operators(
    shape: ModelShape,
    work: Pass,
    *,
    tp: int = 1,
    element_bytes: float = 2.0,
    cache_bytes: float | None = None,
    sharers: Sharers | None = None,
) -> Iterator[Operator]:
    """Yield the operators of one rank in a pass. Embeddings, norms and activations are counted as reads of memory.

    `element_bytes`: of an element of weights. `cache_bytes`: of one of keys and values; by default as in vectors. The
    head has the type of vectors. `sharers`: this replica and the others that share the experts out.
    """
    m, hidden, vector = work.tokens, shape.hidden, vector_bytes(element_bytes)
    yield from _attention(shape, work, tp, element_bytes, vector if cache_bytes is None else cache_bytes)
    if work.tokens > work.logits:
        yield Operator(kind="memory", name="attention of prompts", count=shape.layers, launches=PROMPT_LAUNCHES)
    dense, sparse = shape.dense_layers, shape.expert_layers
    if dense:
        inner = shape.intermediate / tp
        yield _product("gate and up", m, hidden, 2 * inner, element_bytes, dense)
        yield _product("down", m, inner, hidden, element_bytes, dense)
        yield Operator(kind="memory", name="activation", read_bytes=3 * m * inner * vector, count=dense)
    if shape.experts is not None and sparse:
        yield _product("router", m, hidden, shape.experts.count, element_bytes, sparse)
        shared = sharers or Sharers(tokens=m)
        yield from _experts(shape.experts, hidden, shared.tokens, tp * shared.replicas, element_bytes, sparse)
        if shared.replicas > 1:
            size = shared.tokens * hidden * vector
            yield Operator(kind="dispatch", name="dispatch", exchanged_bytes=size, count=sparse, launches=2)
    # two norms with their residuals: each reads two vectors of a token and writes two
    yield Operator(kind="memory", name="norm", read_bytes=4 * m * hidden * vector, count=2 * shape.layers)
    if tp > 1:
        yield Operator(kind="exchange", name="all-reduce", exchanged_bytes=m * hidden * vector, count=2 * shape.layers)
    yield _product("head", work.logits, hidden, shape.vocab / tp, vector, 1)
    yield Operator(kind="memory", name="logits", read_bytes=3 * 4 * work.logits * shape.vocab / tp)


def _product(name: str, m: float, k: float, n: float, element_bytes: float, count: float) -> Operator:
    """A product of [m, k] and [k, n]."""
    read = (m * k + k * n) * element_bytes + m * n * vector_bytes(element_bytes)
    return Operator(kind="product", name=name, flops=2 * m * k * n, read_bytes=read, count=count)


def _attend(flops: float, read_bytes: float, count: float) -> Operator:
    return Operator(
        kind="attention",
        name="attention",
        flops=flops,
        read_bytes=read_bytes,
        count=count,
        launches=ATTENTION_LAUNCHES,
    )


def _attention(shape: ModelShape, work: Pass, tp: int, element_bytes: float, cache_bytes: float) -> Iterator[Operator]:
    m, hidden, layers = work.tokens, shape.hidden, shape.layers
    cached = work.cached_tokens * shape.cache_bytes(tp=tp, element_bytes=cache_bytes) / layers
    heads = shape.heads / tp
    if (latent := shape.latent) is not None:
        head = latent.nope_dim + latent.rope_dim
        if latent.query_rank:
            yield _product("query down", m, hidden, latent.query_rank, element_bytes, layers)
        yield _product("query up", m, latent.query_rank or hidden, heads * head, element_bytes, layers)
        yield _product("cache down", m, hidden, latent.kv_rank + latent.rope_dim, element_bytes, layers)
        up = heads * (latent.nope_dim + latent.value_dim)
        yield _product("cache up", m, latent.kv_rank, up, element_bytes, layers)
        flops = 2 * work.pairs * heads * (head + latent.value_dim)
        yield _attend(flops, cached, layers)
        yield _product("output", m, heads * latent.value_dim, hidden, element_bytes, layers)
        return
    kv = max(1.0, shape.kv_heads / tp) * shape.head_dim
    query = heads * shape.head_dim
    yield _product("query, key and value", m, hidden, query + 2 * kv, element_bytes, layers)
    flops = 4 * work.pairs * query
    yield _attend(flops, cached, layers)
    yield _product("output", m, query, hidden, element_bytes, layers)


def _experts(
    experts: Experts, hidden: int, m: float, ranks: int, element_bytes: float, layers: int
) -> Iterator[Operator]:
    """Each rank has a part of the experts. Those that no token is sent to are not read. The busiest rank counts."""
    touched = experts.count * (1 - (1 - experts.per_token / experts.count) ** m)
    rows, inner = m * experts.per_token * ranks ** (SKEW - 1), experts.intermediate
    weights = 3 * hidden * inner
    yield Operator(
        kind="grouped",
        name="experts",
        flops=2 * rows * weights,
        read_bytes=touched * weights * element_bytes / ranks,
        count=layers,
        launches=EXPERT_LAUNCHES,
    )
    # the vectors are gathered, written, read for the sum, and between the products
    moved = rows * (3 * hidden + 3 * inner) * vector_bytes(element_bytes)
    yield Operator(kind="memory", name="vectors of experts", read_bytes=moved, count=layers, launches=0.0)
    if experts.shared_intermediate:
        inner_size = experts.shared_intermediate / ranks
        yield _product("shared experts, up", m, hidden, 2 * inner_size, element_bytes, layers)
        yield _product("shared experts, down", m, inner_size, hidden, element_bytes, layers)
