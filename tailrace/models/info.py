"""Checks that engine and trainer read a model directory alike, from its JSON and its safetensors headers.

Imports no torch.
"""

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
from safetensors import SafetensorError, safe_open

from tailrace.errors import UNREADABLE, ModelError, did_you_mean, one_line
from tailrace.models.architecture import CONFIG, Architecture, Shape, parameter_shapes, read_architecture

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
DERIVED = "rotary_emb.inv_freq"
"""The ending of the names of tensors that old checkpoints store, though the configuration implies them."""
_ADAPTER = "adapter_config.json"
_FLOATS = ("BF16", "F16", "F32", "F64")

Form = TypeVar("Form")


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
    """The longest sequence, in tokens."""
    tied: bool
    """Whether the embedding is the output head too."""
    parameters: int
    """The number of parameters; a tied embedding counts once."""
    bytes: int
    """The bytes of those parameters as stored."""

    @property
    def kind(self) -> str:
        """What models have in common that can have each other's weights and tokens, in words."""
        return (
            f"{self.family} with {self.parameters:,} parameters in {self.layers} layers of {self.hidden}, "
            f"{self.heads} and {self.kv_heads} heads of {self.head_dim}, and {self.vocab:,} tokens"
        )


class _Entry(msgspec.Struct):
    """The entry of a tensor in the header of a safetensors file."""

    dtype: str
    shape: Shape
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """The place where a tensor is stored."""

    file: Path
    dtype: str
    shape: Shape
    start: int
    """The first byte of its data in the file; the data ends before `stop`."""
    stop: int

    def data(self) -> bytes:
        """Read the data as stored."""
        with self.file.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content[self.start : self.stop]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def describe_model(directory: Path) -> ModelInfo:
    """Describe the model in a Hugging Face directory, and check that its configuration and weights agree.

    Raises:
        ModelError: a file is missing or damaged, the family or a field of the configuration is not supported, or the
            weights are not exactly those that the configuration names, each in its shape.
    """
    architecture = read_architecture(directory)
    if (directory / _ADAPTER).exists():
        raise ModelError(f"{directory} has {_ADAPTER}; merge the adapter into the model's weights first, and remove it")
    tensors = _tensors(directory)
    _check_tied(directory, architecture, tensors)
    _check_tensors(directory, architecture, tensors)
    return ModelInfo(
        family=architecture.family,
        layers=architecture.layers,
        hidden=architecture.hidden_size,
        heads=architecture.query_heads,
        kv_heads=architecture.kv_heads,
        head_dim=architecture.head_dim,
        intermediate=architecture.intermediate_size,
        vocab=architecture.vocab_size,
        context_length=architecture.max_positions,
        tied=architecture.tied,
        parameters=sum(math.prod(tensor.shape) for tensor in tensors.values()),
        bytes=sum(tensor.stop - tensor.start for tensor in tensors.values()),
    )


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a directory: one, or those that its index names. Empty where there are none.

    Where a directory has both, the single file counts, as in transformers.

    Raises:
        ModelError: the index is corrupt.
    """
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.is_file():
        return [single]
    if not index.is_file():
        return []
    return [directory / name for name in sorted(set(_decode(_read(index), _Index, index).weight_map.values()))]


def _check_tied(directory: Path, architecture: Architecture, tensors: dict[str, _Tensor]) -> None:
    """Check that the head fits `tie_word_embeddings`. Remove a stored copy of the embedding that is the head too."""
    if not architecture.tied:
        if HEAD not in tensors:
            raise ModelError(f"{directory} has no {HEAD}, and its {CONFIG} says tie_word_embeddings: false")
        return
    head, embedding = tensors.pop(HEAD, None), tensors.get(EMBEDDING)
    if head is None or embedding is None:
        return
    if (head.dtype, head.shape) != (embedding.dtype, embedding.shape) or head.data() != embedding.data():
        raise ModelError(
            f"{directory} has {HEAD} with other numbers than {EMBEDDING}, and its {CONFIG} says tie_word_embeddings: "
            f"true; set it to false, or remove {HEAD}"
        )


def _check_tensors(directory: Path, architecture: Architecture, tensors: Mapping[str, _Tensor]) -> None:
    expected = parameter_shapes(architecture)
    for name, tensor in tensors.items():
        if name not in expected:
            raise ModelError(
                f"{tensor.file} has {name}, which {directory / CONFIG} gives no place{did_you_mean(name, expected)}"
            )
        if tensor.shape != expected[name]:
            raise ModelError(
                f"{tensor.file} has {name} of shape {tensor.shape}; by {directory / CONFIG} it is {expected[name]}"
            )
        if tensor.dtype not in _FLOATS:
            raise ModelError(
                f"{tensor.file} has {name} of type {tensor.dtype}; supported are {', '.join(_FLOATS)}: quantized "
                "weights cannot be trained"
            )
    if missing := expected.keys() - tensors.keys():
        raise ModelError(
            f"{directory} lacks {len(missing)} weights that its {CONFIG} asks for, such as {min(missing)}; fetch it "
            "again"
        )


def _tensors(directory: Path) -> dict[str, _Tensor]:
    files = weight_files(directory)
    if not files:
        raise ModelError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}")
    tensors: dict[str, _Tensor] = {}
    for file in files:
        for name, tensor in _header(file).items():
            if name in tensors:
                raise ModelError(f"{name} is in both {tensors[name].file} and {file}; remove one of them")
            if not name.endswith(DERIVED):
                tensors[name] = tensor
    return tensors


def _header(file: Path) -> dict[str, _Tensor]:
    """Read the tensors of a safetensors file: 8 bytes of header length, a JSON header, then the data."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = stream.read(min(length, file.stat().st_size))
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from None
    entries = _decode(header, dict[str, msgspec.Raw], file)
    entries.pop("__metadata__", None)
    start, tensors = 8 + length, {}
    for name, raw in entries.items():
        entry = _decode(raw, _Entry, file)
        first, last = entry.data_offsets
        tensors[name] = _Tensor(file=file, dtype=entry.dtype, shape=entry.shape, start=start + first, stop=start + last)
    _check_size(file, max((tensor.stop for tensor in tensors.values()), default=start))
    return tensors


def _check_size(file: Path, expected: int) -> None:
    if file.stat().st_size != expected:
        raise ModelError(f"{file} is {file.stat().st_size} bytes long and should be {expected}; fetch it again")
    try:
        with safe_open(file, framework="np"):  # checks that the data lies as the header says
            pass
    except SafetensorError as error:
        raise ModelError(f"{file} cannot be read as safetensors: {one_line(error)}; fetch it again") from None


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from None


def _decode(raw: bytes | msgspec.Raw, form: type[Form], file: Path) -> Form:
    try:
        return msgspec.json.decode(raw, type=form)
    except UNREADABLE as error:
        raise ModelError(f"{file} is corrupt or of another kind of model: {one_line(error)}") from None
