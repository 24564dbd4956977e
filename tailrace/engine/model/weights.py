"""Weights under their Hugging Face names: checking that all are there, and reading them from a directory."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tailrace.errors import EngineError, ModelError, did_you_mean
from tailrace.models.architecture import Architecture, Shape, parameter_shapes
from tailrace.models.info import DERIVED, EMBEDDING, HEAD, INDEX_FILE, SINGLE_FILE, describe_model, weight_files


@dataclass(frozen=True, slots=True)
class TensorShard:
    """A rectangular part of a parameter."""

    tensor: torch.Tensor
    """The values, with as many dimensions as the parameter."""
    start: tuple[int, ...]
    """The position where the part begins in the parameter, in each dimension."""


Weights = Iterable[tuple[str, torch.Tensor | TensorShard]]
"""Parameters under their HF names, each whole or as shards that cover it once; in any order."""


def check_weights(architecture: Architecture, tensors: Weights) -> Mapping[str, torch.Tensor]:
    """Collect the model's weights from `tensors`; see `collect_weights`. A tied head may be there or not."""
    return collect_weights(parameter_shapes(architecture), tensors, tied=architecture.tied)


def collect_weights(expected: Mapping[str, Shape], tensors: Weights, *, tied: bool) -> Mapping[str, torch.Tensor]:
    """Collect `tensors`, and put shards together. Each element of each parameter must come once, and nothing else.

    Where the head is `tied`, a head that comes along has to equal the embedding, and is left out.

    Raises:
        EngineError: a weight is missing, unknown, there twice, of another shape or kind; the message names the first.
    """
    if tied and EMBEDDING in expected:
        return _without_head(_collect({**expected, HEAD: expected[EMBEDDING]}, tensors, optional={HEAD}))
    return _collect(expected, tensors, optional=())


def _without_head(weights: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    head = weights.pop(HEAD, None)
    if head is not None and not _same_numbers(head.to(weights[EMBEDDING].device).float(), weights[EMBEDDING].float()):
        raise EngineError(f"{HEAD} has other numbers than {EMBEDDING}, and this model ties them; send one of them")
    return weights


def _same_numbers(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether they are equal bit for bit, except for the kind of NaN.

    A model whose training diverged fails with its first token, not here.
    """
    return torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)


def _collect(expected: Mapping[str, Shape], tensors: Weights, *, optional: Collection[str]) -> dict[str, torch.Tensor]:
    whole: dict[str, torch.Tensor] = {}
    assemblies: dict[str, _Assembly] = {}
    for name, item in tensors:
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
    if missing := expected.keys() - whole.keys() - set(optional):
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
            EngineError: the shard lies outside, overlaps another one, or is of another dtype.
        """
        _check_tensor(self._name, shard.tensor)
        box = self._box(shard)
        if self._tensor is None:
            self._tensor = torch.empty(self._shape, dtype=shard.tensor.dtype, device=shard.tensor.device)
        if shard.tensor.dtype != self._tensor.dtype:
            raise EngineError(
                f"{self._name} has shards of {self._tensor.dtype} and {shard.tensor.dtype}; use one dtype"
            )
        if not shard.tensor.numel():  # a rank that holds padding only
            return
        for other in self._boxes:
            if all(a.start < b.stop and b.start < a.stop for a, b in zip(box, other, strict=True)):
                raise EngineError(f"{self._name} has overlapping shards at {_place(other)} and {_place(box)}")
        self._boxes.append(box)
        self._tensor[tuple(slice(side.start, side.stop) for side in box)] = shard.tensor

    def whole(self) -> torch.Tensor:
        """Return the parameter.

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
    """Read and check the weights of a model's directory.

    Raises:
        ModelError: a file is missing or broken, or the weights are not those of `architecture`.
    """
    describe_model(directory)
    try:
        return check_weights(architecture, read_weights(directory))
    except EngineError as error:
        raise ModelError(f"{directory}: the weights do not fit config.json: {error}") from error


def read_weights(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of model.safetensors, or of the files that its index lists; memory-mapped, on the CPU.

    Raises:
        ModelError: there is no such file, or one is broken.
    """
    files = weight_files(directory)
    if not files:
        raise ModelError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}")
    with ExitStack() as stack:
        for path in files:
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path} cannot be read as safetensors: {error}") from error
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                if not name.endswith(DERIVED):
                    yield name, file.get_tensor(name)
