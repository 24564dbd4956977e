"""Weights under their Hugging Face names: what a model must have, and reading them from a directory."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from tailrace.engine.architecture import Architecture
from tailrace.errors import EngineError, ModelError

Shape = tuple[int, ...]

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


def check_weights(
    architecture: Architecture, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Mapping[str, torch.Tensor]:
    """Collect `tensors`: none missing, unknown, of another shape or of integers. A tied head may be there or not.

    Raises:
        EngineError: it names the first offender.
    """
    named = dict(tensors)
    expected = expected_shapes(architecture)
    if architecture.tied:
        named.pop("lm_head.weight", None)
    if missing := expected.keys() - named.keys():
        raise EngineError(f"{len(missing)} weights are missing, such as {min(missing)}; every parameter is needed")
    if unknown := named.keys() - expected.keys():
        raise EngineError(f"this {architecture.family} model has no weight {min(unknown)!r}; use its HF names")
    for name, tensor in named.items():
        if tuple(tensor.shape) != expected[name]:
            raise EngineError(f"{name} has shape {tuple(tensor.shape)}; the model has {expected[name]}")
        if not tensor.is_floating_point():
            raise EngineError(f"{name} has dtype {tensor.dtype}; weights are floating-point numbers")
    return named


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
