"""What a model directory holds, read from its JSON and its safetensors headers alone. Imports no torch."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from tailrace.errors import ModelError

FAMILIES = ("llama", "qwen2", "qwen3")
"""`model_type` of the supported models."""

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_HEAD = "lm_head.weight"

Shape = TypeVar("Shape")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Sizes of a model."""

    family: str
    layers: int
    hidden: int
    heads: int
    """Query heads."""
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context_length: int
    """Positions, in tokens."""
    tied: bool
    """The embedding is the output head too."""
    parameters: int
    """A tied embedding counts once."""
    bytes: int
    """Of those parameters as stored."""


class _Family(msgspec.Struct):
    model_type: str


class _Config(msgspec.Struct):
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    tie_word_embeddings: bool = False


class _Tensor(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def describe_model(directory: Path) -> ModelInfo:
    """The sizes of the model in a Hugging Face directory.

    Raises:
        ModelError: a file is missing or corrupt, or the family is not supported.
    """
    raw = _read(directory / "config.json")
    family = _decode(raw, _Family, directory / "config.json").model_type
    if family not in FAMILIES:
        raise ModelError(f"{directory} is a model of family {family!r}; supported are {', '.join(FAMILIES)}")
    config = _decode(raw, _Config, directory / "config.json")
    tensors = _tensors(directory)
    if config.tie_word_embeddings:
        tensors.pop(_HEAD, None)
    elif _HEAD not in tensors:
        raise ModelError(f"{directory} has no {_HEAD}, and its config.json says tie_word_embeddings: false")
    return ModelInfo(
        family=family,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        context_length=config.max_position_embeddings,
        tied=config.tie_word_embeddings,
        parameters=sum(math.prod(tensor.shape) for tensor in tensors.values()),
        bytes=sum(tensor.data_offsets[1] - tensor.data_offsets[0] for tensor in tensors.values()),
    )


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a directory: one, or those that its index names. Empty where there are none.

    Raises:
        ModelError: the index is corrupt.
    """
    index = directory / _INDEX
    if index.is_file():
        names = _decode(_read(index), _Index, index).weight_map.values()
        return [directory / name for name in sorted(set(names))]
    return [directory / _SINGLE] if (directory / _SINGLE).is_file() else []


def _tensors(directory: Path) -> dict[str, _Tensor]:
    files = weight_files(directory)
    if not files:
        raise ModelError(f"{directory} has neither {_SINGLE} nor {_INDEX}")
    return {name: tensor for file in files for name, tensor in _header(file)}


def _header(file: Path) -> Iterator[tuple[str, _Tensor]]:
    """The tensors of a safetensors file: 8 bytes of header length, a JSON header, then the data."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = stream.read(min(length, file.stat().st_size))
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from None
    entries = _decode(header, dict[str, msgspec.Raw], file)
    entries.pop("__metadata__", None)
    tensors = {name: _decode(entry, _Tensor, file) for name, entry in entries.items()}
    _check_size(file, 8 + length, tensors)
    yield from tensors.items()


def _check_size(file: Path, start: int, tensors: Mapping[str, _Tensor]) -> None:
    expected = start + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if file.stat().st_size != expected:
        raise ModelError(f"{file} is {file.stat().st_size} bytes long and should be {expected}; fetch it again")


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from None


def _decode(raw: bytes | msgspec.Raw, kind: type[Shape], file: Path) -> Shape:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} is corrupt or of another kind of model: {error}") from None
