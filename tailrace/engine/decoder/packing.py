"""The layout of a rank's weights in memory, in groups: the embedding, the head, the final norm, and each layer.

A group is one piece of memory, so that ranks exchange it in one call and release it as a whole. All shards of a
degree have the same shapes, so a group looks the same on each of them.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tailrace.models.architecture import Architecture

Group = int | str
"""A layer's number, or one of `_ENDS`."""

_ENDS = {"embedding": "model.embed_tokens.", "head": "lm_head.", "norm": "model.norm."}
_HF_NAMES = {
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "out": "self_attn.o_proj.weight",
    "out_bias": "self_attn.o_proj.bias",
    "down": "mlp.down_proj.weight",
    **dict.fromkeys(_ENDS, "weight"),
}
"""HF names of the parameters that are not fused with others."""
_ALIGNMENT = 64
"""Bytes: a cache line."""


class Format(ABC):
    """A decoder's format for a matrix: the same numbers as [rows, columns], in an order of its own."""

    matrices: torch.dtype
    vectors: torch.dtype

    @abstractmethod
    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Return the shape of a stored matrix.

        Dimension 0 counts rows and dimension 1 columns, in grains of one or more, so that the matrix can be cut there.
        """

    @abstractmethod
    def write(self, weight_NK: torch.Tensor, matrix: torch.Tensor) -> None:
        """Put a weight of any float dtype into `matrix`, which has its `shape`."""

    @abstractmethod
    def gate_and_up(self, fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the gate and up parts of their fused matrix."""


@dataclass(frozen=True)
class RowMajor(Format):
    """Stores a matrix as it comes, in grains of 1. The gate's rows are before those of up."""

    matrices: torch.dtype
    vectors: torch.dtype

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """See `Format`."""
        return rows, columns

    def write(self, weight_NK: torch.Tensor, matrix: torch.Tensor) -> None:
        """See `Format`."""
        matrix.copy_(weight_NK)

    def gate_and_up(self, fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Format`."""
        gate, up = fused.chunk(2)
        return gate, up


@dataclass(frozen=True, slots=True)
class _Field:
    """The place of a tensor in the memory of its group."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape) * self.dtype.itemsize

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        return memory[self.offset : self.end].view(self.dtype).view(self.shape)


class Packing:
    """The layout of the shards of one degree. It holds plain numbers: callers pass the memory, [size(group)] uint8."""

    def __init__(self, architecture: Architecture, form: Format) -> None:
        """Lay out a shard. `architecture` is the shard's own (`sharding.local_architecture`)."""
        self._architecture = architecture
        self._form = form
        self._ends = {group: self._arrange({group: shape}) for group, shape in _end_shapes(architecture).items()}
        self._layer = self._arrange(_layer_shapes(architecture))

    @property
    def groups(self) -> list[Group]:
        """All groups, the layers last and in order."""
        return [*self._ends, *range(self._architecture.layers)]

    def size(self, group: Group) -> int:
        """The bytes of a group's memory."""
        return _aligned(max(field.end for field in self._fields(group).values()))

    def make(self, group: Group, device: torch.device) -> torch.Tensor:
        """Allocate memory for the group, with undefined contents."""
        return torch.empty(self.size(group), dtype=torch.uint8, device=device)

    def fused(self, group: Group, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors that the decoder computes with, as views: fused, and under the decoder's own names."""
        return {name: field.of(memory) for name, field in self._fields(group).items()}

    def parts(self, group: Group, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parameters under their HF names, as views in the decoder's format.

        A parameter can be cut along dimensions 0 and 1, in grains of (its length there) / (the view's).
        """
        fused = self.fused(group, memory)
        parts = {prefix(group) + _HF_NAMES[name]: fused[name] for name in _HF_NAMES if name in fused}
        if isinstance(group, str):
            return parts
        attention, mlp = (f"{prefix(group)}{block}." for block in ("self_attn", "mlp"))
        sizes = self._architecture.qkv_sizes
        for kind, name in (("weight", "qkv"), ("bias", "qkv_bias")):
            if name in fused:
                grain = sum(sizes) // len(fused[name])
                split = torch.split(fused[name], [size // grain for size in sizes])
                parts |= {f"{attention}{part}_proj.{kind}": view for part, view in zip("qkv", split, strict=True)}
        gate, up = self._form.gate_and_up(fused["gate_up"])
        return parts | {f"{mlp}gate_proj.weight": gate, f"{mlp}up_proj.weight": up}

    def write(self, group: Group, memory: torch.Tensor, named: Mapping[str, torch.Tensor]) -> None:
        """Fill the memory with the shard's own part of these tensors (`sharding.shard_weights`), of any float dtype.

        Vectors may be stored in a wider dtype. They are rounded to that of the matrices, so that a trainer's master
        weights and the model that is exported from them give the same numbers.
        """
        for name, part in self.parts(group, memory).items():
            if part.ndim > 1:
                self._form.write(named[name], part)
            else:
                part.copy_(named[name].to(self._form.matrices))

    def _fields(self, group: Group) -> dict[str, _Field]:
        return self._ends[group] if isinstance(group, str) else self._layer

    def _arrange(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, _Field]:
        """Lay out the tensors one after the other."""
        fields: dict[str, _Field] = {}
        end = 0
        for name, shape in shapes.items():
            if len(shape) == 2:
                field = _Field(_aligned(end), self._form.shape(*shape), self._form.matrices)
            else:
                field = _Field(_aligned(end), shape, self._form.vectors)
            fields[name], end = field, field.end
        return fields


def prefix(group: Group) -> str:
    """The beginning of the HF names of the group's parameters."""
    return _ENDS[group] if isinstance(group, str) else f"model.layers.{group}."


def _end_shapes(a: Architecture) -> dict[str, tuple[int, ...]]:
    vocabulary = (a.vocab_size, a.hidden_size)
    return {"embedding": vocabulary, **({} if a.tied else {"head": vocabulary}), "norm": (a.hidden_size,)}


def _layer_shapes(a: Architecture) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's tensors: rows and columns, or the length of a vector."""
    shapes: dict[str, tuple[int, ...]] = {
        "qkv": (sum(a.qkv_sizes), a.hidden_size),
        "out": (a.hidden_size, a.query_heads * a.head_dim),
        "gate_up": (2 * a.intermediate_size, a.hidden_size),
        "down": (a.hidden_size, a.intermediate_size),
        "input_norm": (a.hidden_size,),
        "post_norm": (a.hidden_size,),
    }
    if a.qkv_bias:
        shapes["qkv_bias"] = (sum(a.qkv_sizes),)
    if a.out_bias:
        shapes["out_bias"] = (a.hidden_size,)
    if a.qk_norm:
        shapes["q_norm"] = shapes["k_norm"] = (a.head_dim,)
    return shapes


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
