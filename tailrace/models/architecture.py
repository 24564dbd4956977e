"""The contents of a model's config.json. Every field that changes what a model computes is read here, or refused.

The engine computes what these values say. The trainer's transformers computes what the file says. So a file that the
two would read differently has to be refused. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from tailrace.config.recipe_text import in_yaml
from tailrace.errors import UNREADABLE, ModelError, one_line

FAMILIES = ("llama", "qwen2", "qwen3")
"""`model_type` of the supported models."""
ROPE_TYPES = ("default", "linear", "llama3")
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"

_DTYPES = (None, "float32", "float16", "bfloat16", "float64")
_PLAIN = (None, False)
_NOT_COMPUTED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": _PLAIN,
    "use_sliding_window": _PLAIN,
    "attention_chunk_size": (None,),
    "per_layer_config": (None, {}),
    "quantization_config": (None,),
    "compression_config": (None,),
    "transformers_weights": (None,),
    "partial_rotary_factor": (None, 1.0),
    "rope_interleave": _PLAIN,
    "is_causal": (None, True),
    "is_encoder_decoder": _PLAIN,
    "add_cross_attention": _PLAIN,
    "output_attentions": _PLAIN,
    "output_hidden_states": (None, False, True),
    "return_dict": (None, True),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_multiplier": (None, 1.0),
    "embedding_multiplier": (None, 1.0),
    "residual_multiplier": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "logit_scale": (None, 1.0),
    "dtype": _DTYPES,
    "torch_dtype": _DTYPES,
}
"""Fields with the values that change nothing. Other values would be ignored by the engine, the trainer or both."""

Size = Annotated[int, msgspec.Meta(ge=1, le=2**24)]
Scale = Annotated[float, msgspec.Meta(gt=0, le=1e12)]
Shape = tuple[int, ...]
Form = TypeVar("Form")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding (Su et al. 2021) and how its frequencies are scaled."""

    type: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Shapes and switches of a decoder of the Llama kind."""

    family: str
    layers: int
    hidden_size: int
    intermediate_size: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    max_positions: int
    rope: Rope
    tied: bool
    """Whether the output head is the embedding."""
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool
    eos_ids: tuple[int, ...]

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Rows of the query, key and value parts of the fused matrix."""
        return self.query_heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim


class _Rope(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of `rope_parameters`, which files before 2026 call `rope_scaling`."""

    rope_type: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    rope_theta: Scale | UnsetType = UNSET
    partial_rotary_factor: float | UnsetType = UNSET
    factor: Scale | UnsetType = UNSET
    low_freq_factor: Scale | UnsetType = UNSET
    high_freq_factor: Scale | UnsetType = UNSET
    original_max_position_embeddings: Size | UnsetType = UNSET


class _Config(msgspec.Struct):
    """The fields of config.json, with the defaults of transformers."""

    num_hidden_layers: Annotated[int, msgspec.Meta(ge=1, le=10_000)]
    hidden_size: Size
    num_attention_heads: Size
    intermediate_size: Size
    vocab_size: Size
    max_position_embeddings: Size
    num_key_value_heads: Size | UnsetType | None = UNSET
    head_dim: Size | None = None
    rms_norm_eps: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: Scale = 10_000.0
    original_max_position_embeddings: Size | UnsetType = UNSET
    sliding_window: int | None = None
    layer_types: list[str] | None = None
    auto_map: dict[str, Any] | None = None
    pad_token_id: int | None = None


def read_architecture(directory: Path) -> Architecture:
    """Read config.json and generation_config.json.

    Raises:
        ModelError: a file is missing or broken, or asks for something that is not computed. The message names
            the field.
    """
    path = directory / CONFIG
    values = _read_json(path)
    family = values.get("model_type")
    if family not in FAMILIES:
        raise ModelError(f"{path} is of a model of family {family!r}; supported are {', '.join(FAMILIES)}")
    _refuse_fields(path, values)
    config = _convert(values, _Config, path)
    kv_heads, head_dim = _heads(path, family, config)
    return Architecture(
        family=family,
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        query_heads=config.num_attention_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        norm_eps=config.rms_norm_eps,
        max_positions=config.max_position_embeddings,
        rope=_rope(path, config),
        tied=config.tie_word_embeddings,
        qkv_bias=family == "qwen2" or config.attention_bias,
        out_bias=family != "qwen2" and config.attention_bias,
        qk_norm=family == "qwen3",
        eos_ids=read_eos_ids(directory, vocab_size=config.vocab_size),
    )


def read_eos_ids(directory: Path, *, vocab_size: int) -> tuple[int, ...]:
    """Read the end-of-sequence tokens: those of generation_config.json, or else those of config.json.

    Raises:
        ModelError: they are not tokens of the model.
    """
    path = directory / GENERATION_CONFIG
    eos = _read_json(path).get("eos_token_id") if path.exists() else None
    if eos is None:
        path = directory / CONFIG
        eos = _read_json(path).get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ModelError(f"{path} has eos_token_id {token!r}; the model's tokens are 0 … {vocab_size - 1}")
    return tuple(ids)


def parameter_shapes(architecture: Architecture) -> dict[str, Shape]:
    """The shape of every parameter of the model, by its HF name. The head of a tied model is not among them."""
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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; {path.parent} is not a Hugging Face model directory") from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    except UNREADABLE as error:
        raise ModelError(f"{path} is not JSON: {one_line(error)}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds {in_yaml(content)}; expected a JSON object")
    return content


def _convert(values: Mapping[str, Any], form: type[Form], path: Path, place: str = "$") -> Form:
    try:
        return msgspec.convert(values, form)
    except msgspec.ValidationError as error:
        raise ModelError(f"{path} does not fit: {one_line(error).replace('$', place)}") from None


def _refuse_fields(path: Path, values: Mapping[str, Any]) -> None:
    for name, plain in _NOT_COMPUTED.items():
        value = values.get(name, plain[0])
        if not any(value == same and isinstance(value, bool) == isinstance(same, bool) for same in plain):
            wanted = " or ".join("null" if same is None else repr(same) for same in plain)
            raise ModelError(f"{path} has {name} {_short(value)}, which is not supported; only {wanted} is")


def _heads(path: Path, family: str, config: _Config) -> tuple[int, int]:
    """The number of KV heads, and the width of a head."""
    heads, hidden = config.num_attention_heads, config.hidden_size
    given = config.num_key_value_heads
    default = heads if family == "llama" else 32
    kv_heads = (default if given is UNSET else given) or heads
    if heads % kv_heads:
        raise ModelError(f"{path} has num_attention_heads {heads} and num_key_value_heads {kv_heads}; one must divide")
    if (family == "llama" or config.head_dim is None) and hidden % heads:
        raise ModelError(f"{path} has hidden_size {hidden}, which num_attention_heads {heads} does not divide")
    head_dim = config.head_dim or (128 if family == "qwen3" else hidden // heads)
    if head_dim % 2:
        raise ModelError(f"{path} has head_dim {head_dim}; rotary embeddings need an even one")
    vocab, pad = config.vocab_size, config.pad_token_id
    if pad is not None and not -vocab <= pad < vocab:
        raise ModelError(f"{path} has pad_token_id {pad}; the model's tokens are 0 … {vocab - 1}")
    if config.auto_map and "AutoModelForCausalLM" in config.auto_map:
        raise ModelError(f"{path} has auto_map, so code of its own computes the model, which is not supported")
    if (family == "llama" and config.sliding_window is not None) or set(config.layer_types or ()) - {"full_attention"}:
        field = "layer_types" if config.layer_types else "sliding_window"
        raise ModelError(f"{path} has {field}, and sliding-window attention is not supported; only full attention is")
    if config.layer_types is not None and len(config.layer_types) != config.num_hidden_layers:
        layers, types = config.num_hidden_layers, len(config.layer_types)
        raise ModelError(f"{path} has num_hidden_layers {layers} and {types} layer_types; they must agree")
    return kv_heads, head_dim


def _rope(path: Path, config: _Config) -> Rope:
    name = "rope_scaling" if config.rope_scaling else "rope_parameters"
    values = config.rope_scaling or config.rope_parameters or {}
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ModelError(f"{path} has {name}.rope_type {kind!r}; supported are {', '.join(ROPE_TYPES)}")
    given = _convert(values, _Rope, path, f"$.{name}")
    if given.partial_rotary_factor not in (UNSET, 1.0):
        raise ModelError(f"{path} has {name}.partial_rotary_factor; only whole heads are rotated")
    theta = config.rope_theta if given.rope_theta is UNSET else given.rope_theta
    if kind == "default":
        return Rope(type=kind, theta=theta)
    needed = ("factor",) if kind == "linear" else ("factor", "low_freq_factor", "high_freq_factor")
    scales = {field: getattr(given, field) for field in needed}
    if missing := [field for field in needed if scales[field] is UNSET]:
        raise ModelError(f"{path} has {name} of type {kind} without {', '.join(missing)}")
    if kind == "linear":
        return Rope(type=kind, theta=theta, **scales)
    if scales["low_freq_factor"] >= scales["high_freq_factor"]:
        raise ModelError(f"{path} has {name}.low_freq_factor {scales['low_freq_factor']:g}; high_freq_factor is larger")
    return Rope(type=kind, theta=theta, original_positions=_original_positions(config, given), **scales)


def _original_positions(config: _Config, rope: _Rope) -> int:
    for positions in (config.original_max_position_embeddings, rope.original_max_position_embeddings):
        if positions is not UNSET:
            return positions
    return config.max_position_embeddings


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."
