"""Weights under their Hugging Face names: what a model must have, and reading them from a directory."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from tailrace.engine.architecture import Architecture
from tailrace.errors import EngineError, ModelError, did_you_mean

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorShard:
    """A rectangular part of a parameter."""

    tensor: torch.Tensor
    """With as many dimensions as the parameter."""
    start: tuple[int, ...]
    """Where it begins in the parameter, in each dimension."""


Weights = Iterable[tuple[str, torch.Tensor | TensorShard]]
"""Parameters under their HF names, each whole or as shards that cover it once; in any order."""

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class _Index(msgspec.Struct):
    """What INDEX_FILE says."""

    weight_map: dict[str, str]
    """The file of each tensor."""


def expected_shapes(architecture: Architecture) -> dict[str, Shape]:
    """Every parameter of the model and its shape. The head of a tied model is not among them."""
    a = architecture
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (a.vocab_size, a.hidden_size),
        "model.norm.weight": (a.hidden_size,),
    }
    if not a.tied:
        shapes["lm_head.weight"] = (a.vocab_size, a.hidden_size)
    for index in range(a.layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in _layer_shapes(a).items()}
    return shapes


def _layer_shapes(a: Architecture) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {
        "input_layernorm.weight": (a.hidden_size,),
        "post_attention_layernorm.weight": (a.hidden_size,),
        "self_attn.o_proj.weight": (a.hidden_size, a.query_heads * a.head_dim),
        "mlp.gate_proj.weight": (a.intermediate_size, a.hidden_size),
        "mlp.up_proj.weight": (a.intermediate_size, a.hidden_size),
        "mlp.down_proj.weight": (a.hidden_size, a.intermediate_size),
    }
    for part, rows in zip(("q", "k", "v"), a.qkv_sizes, strict=True):
        shapes[f"self_attn.{part}_proj.weight"] = (rows, a.hidden_size)
        if a.qkv_bias:
            shapes[f"self_attn.{part}_proj.bias"] = (rows,)
    if a.out_bias:
        shapes["self_attn.o_proj.bias"] = (a.hidden_size,)
    if a.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (a.head_dim,)
    return shapes


def check_weights(architecture: Architecture, tensors: Weights) -> Mapping[str, torch.Tensor]:
    """The model's weights from `tensors`; see `collect_weights`. A tied head may be there or not."""
    return collect_weights(expected_shapes(architecture), tensors, tied=architecture.tied)


def collect_weights(expected: Mapping[str, Shape], tensors: Weights, *, tied: bool) -> Mapping[str, torch.Tensor]:
    """Collect `tensors`, and put shards together: each element of each parameter once, and nothing else.

    Where the head is `tied`, one that comes along is left out.

    Raises:
        EngineError: a weight is missing, unknown, there twice, of another shape or kind; it names the first.
    """
    whole: dict[str, torch.Tensor] = {}
    assemblies: dict[str, _Assembly] = {}
    for name, item in tensors:
        if tied and name == "lm_head.weight":
            continue
        if name not in expected:
            raise EngineError(f"this model has no weight {name!r}; use its HF names{did_you_mean(name, expected)}")
        if name in whole:
            raise EngineError(f"{name} comes twice; send each weight once")
        if isinstance(item, TensorShard):
            assemblies.setdefault(name, _Assembly(name, expected[name])).add(item)
        elif name in assemblies:
            raise EngineError(f"{name} comes twice, whole and as shards; send each element once")
        else:
            _check_tensor(name, item)
            if tuple(item.shape) != expected[name]:
                raise EngineError(f"{name} has shape {tuple(item.shape)}; the model has {expected[name]}")
            whole[name] = item
    whole |= {name: assembly.whole() for name, assembly in assemblies.items()}
    if missing := expected.keys() - whole.keys():
        raise EngineError(f"{len(missing)} weights are missing, such as {min(missing)}; every parameter is needed")
    return whole


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise EngineError(f"{name} is a {type(tensor).__name__}; weights are torch tensors or shards of them")
    if tensor.layout != torch.strided or tensor.is_meta:
        raise EngineError(f"{name} is a {tensor.layout} tensor on {tensor.device}; weights are dense and have data")
    if not tensor.is_floating_point():
        raise EngineError(f"{name} has dtype {tensor.dtype}; weights are floating-point numbers")


class _Assembly:
    """A parameter that comes in shards."""

    def __init__(self, name: str, shape: Shape) -> None:
        self._name = name
        self._shape = shape
        self._boxes: list[tuple[range, ...]] = []
        self._tensor: torch.Tensor | None = None

    def add(self, shard: TensorShard) -> None:
        """Copy a shard to its place.

        Raises:
            EngineError: it lies outside, overlaps another one, or is of another dtype.
        """
        _check_tensor(self._name, shard.tensor)
        box = self._box(shard)
        if self._tensor is None:
            self._tensor = torch.empty(self._shape, dtype=shard.tensor.dtype, device=shard.tensor.device)
        if shard.tensor.dtype != self._tensor.dtype:
            raise EngineError(
                f"{self._name} has shards of {self._tensor.dtype} and {shard.tensor.dtype}; use one dtype"
            )
        if not shard.tensor.numel():  # of a rank that holds padding only
            return
        for other in self._boxes:
            if all(a.start < b.stop and b.start < a.stop for a, b in zip(box, other, strict=True)):
                raise EngineError(f"{self._name} has overlapping shards at {_place(other)} and {_place(box)}")
        self._boxes.append(box)
        self._tensor[tuple(slice(side.start, side.stop) for side in box)] = shard.tensor

    def whole(self) -> torch.Tensor:
        """The parameter.

        Raises:
            EngineError: the shards do not cover it.
        """
        covered, total = sum(math.prod(map(len, box)) for box in self._boxes), math.prod(self._shape)
        if covered != total:
            raise EngineError(f"the shards of {self._name} cover {covered} of its {total} elements; send all")
        assert self._tensor is not None
        return self._tensor

    def _box(self, shard: TensorShard) -> tuple[range, ...]:
        sizes = tuple(shard.tensor.shape)
        if not len(sizes) == len(shard.start) == len(self._shape):
            raise EngineError(f"{self._name} has a shard {sizes} at {shard.start}; the model has {self._shape}")
        box = tuple(range(start, start + size) for start, size in zip(shard.start, sizes, strict=True))
        if any(side.start < 0 or side.stop > size for side, size in zip(box, self._shape, strict=True)):
            raise EngineError(f"{self._name} has a shard at {_place(box)}, outside of its shape {self._shape}")
        return box


def _place(box: tuple[range, ...]) -> str:
    return "[" + ", ".join(f"{side.start}:{side.stop}" for side in box) + "]"


def checkpoint_weights(architecture: Architecture, directory: Path) -> Mapping[str, torch.Tensor]:
    """The checked weights of a model's directory.

    Raises:
        ModelError: a file is missing or broken, or the weights are not those of `architecture`.
    """
    try:
        return check_weights(architecture, read_weights(directory))
    except EngineError as error:
        raise ModelError(f"{directory}: the weights do not fit config.json: {error}") from error


def read_weights(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of model.safetensors, or of the files that its index lists; memory-mapped, on the CPU.

    Raises:
        ModelError: no such file, or one is broken.
    """
    with ExitStack() as stack:
        for path in _weight_files(directory):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                raise ModelError(f"{path} cannot be read as safetensors: {error}") from error
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                if not name.endswith("rotary_emb.inv_freq"):  # old checkpoints store what the config implies
                    yield name, file.get_tensor(name)


def _weight_files(directory: Path) -> list[Path]:
    index = directory / INDEX_FILE
    if not index.exists():
        files = [directory / SINGLE_FILE]
    else:
        try:
            weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
        except msgspec.MsgspecError as error:
            raise ModelError(f"{index} is not an index of weight files: {error}") from error
        files = [directory / name for name in sorted(set(weight_map.values()))]
    for path in files:
        if not path.exists():
            raise ModelError(f"{path} does not exist; the engine reads {SINGLE_FILE} or the files of {INDEX_FILE}")
    return files
