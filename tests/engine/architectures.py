"""Model architectures for tests that need no model."""

import dataclasses
from typing import Any

from tailrace.models.architecture import Architecture, Rope

_SMALL = Architecture(
    family="llama",
    layers=2,
    hidden_size=8,
    intermediate_size=8,
    query_heads=2,
    kv_heads=2,
    head_dim=4,
    vocab_size=10,
    norm_eps=1e-5,
    max_positions=64,
    rope=Rope(type="default", theta=1e4),
    tied=True,
    qkv_bias=False,
    out_bias=False,
    qk_norm=False,
    eos_ids=(),
)


def small_architecture(**changes: Any) -> Architecture:
    """An architecture of two layers with two heads each, with `changes` to its fields."""
    return dataclasses.replace(_SMALL, **changes)
