"""What a model's config.json says, reduced to what the engine computes with."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tailrace.errors import ModelError

FAMILIES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding (Su et al. 2021) and how its frequencies are scaled."""

    type: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """[head_dim / 2], radians per position, fp32."""
        plain = self.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        match self.type:
            case "default":
                return plain
            case "linear":
                return plain / self.factor
            case _:
                return self._llama3(plain)

    def _llama3(self, plain: torch.Tensor) -> torch.Tensor:
        """Slow down long wavelengths, keep short ones, blend between (Llama 3.1)."""
        turns = self.original_positions * plain / (2 * math.pi)
        keep = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return keep * plain + (1 - keep) * plain / self.factor


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
    """The output head is the embedding."""
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool
    eos_ids: tuple[int, ...]

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Rows of the query, key and value parts of the fused matrix."""
        return self.query_heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim


def read_architecture(directory: Path) -> Architecture:
    """Read config.json and generation_config.json.

    Raises:
        ModelError: config.json is missing or broken, or asks for something that the engine does not compute.
    """
    family = _read_json(directory / "config.json").get("model_type")
    if family not in FAMILIES:
        raise ModelError(f"{directory}: the engine cannot run model_type {family!r}; it runs {', '.join(FAMILIES)}")
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory)
    _refuse_unsupported(directory, config)
    return Architecture(
        family=family,
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        query_heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocab_size=config.vocab_size,
        norm_eps=config.rms_norm_eps,
        max_positions=config.max_position_embeddings,
        rope=_rope(directory, config),
        tied=bool(config.tie_word_embeddings),
        qkv_bias=family == "qwen2" or bool(config.attention_bias),
        out_bias=family != "qwen2" and bool(config.attention_bias),
        qk_norm=family == "qwen3",
        eos_ids=read_eos_ids(directory),
    )


def read_eos_ids(directory: Path) -> tuple[int, ...]:
    """End-of-sequence tokens: those of generation_config.json, else those of config.json."""
    path = directory / "generation_config.json"
    eos = _read_json(path).get("eos_token_id") if path.exists() else None
    if eos is None:
        eos = _read_json(directory / "config.json").get("eos_token_id")
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; {path.parent} is not a Hugging Face model directory") from None
    except ValueError as error:  # bad JSON, or not even UTF-8
        raise ModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}; expected a JSON object")
    return content


def _refuse_unsupported(directory: Path, config: Any) -> None:
    layer_types = set(getattr(config, "layer_types", None) or ())
    if getattr(config, "use_sliding_window", False) or layer_types - {"full_attention"}:
        raise ModelError(f"{directory}: sliding-window attention is not supported; only full attention is")
    if config.hidden_act != "silu":
        raise ModelError(f"{directory}: hidden_act {config.hidden_act!r} is not supported; only silu is")
    if getattr(config, "mlp_bias", False):
        raise ModelError(f"{directory}: mlp_bias is not supported; only MLPs without bias are")


def _rope(directory: Path, config: Any) -> Rope:
    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise ModelError(f"{directory}: rope type {kind!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{directory}: partial_rotary_factor is not supported; only whole heads are rotated")
    theta = float(parameters["rope_theta"])
    match kind:
        case "default":
            return Rope(type=kind, theta=theta)
        case "linear":
            return Rope(type=kind, theta=theta, factor=float(parameters["factor"]))
        case _:
            return Rope(
                type=kind,
                theta=theta,
                factor=float(parameters["factor"]),
                low_freq_factor=float(parameters["low_freq_factor"]),
                high_freq_factor=float(parameters["high_freq_factor"]),
                original_positions=int(parameters["original_max_position_embeddings"]),
            )
