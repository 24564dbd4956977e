"""Sizes from a Hugging Face config.json: dense models and mixtures of experts, with grouped or latent attention.

The fields have other names and other defaults in other families. Those of Llama, Mistral, Qwen, Mixtral, GLM and
DeepSeek are known; the others are refused. A sliding window counts as attention to all tokens.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tailrace.config.recipe_text import in_yaml
from tailrace.errors import UNREADABLE, PlanError, did_you_mean, one_line
from tailrace.planning.model_shape.base import Experts, Latent, ModelShape

CONFIG = "config.json"
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_WITH_BIAS = ("qwen2", "qwen2_moe", "qwen2_5_vl", "qwen2_5_vl_text")
_WITH_QK_NORM = ("qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text")
_FAMILIES = (
    *_WITH_BIAS,
    *_WITH_QK_NORM,
    *("llama", "mistral", "mixtral", "glm4", "glm4_moe", "deepseek_v2", "deepseek_v3", "kimi_k2"),
)
"""`model_type` of those that are known."""
_FULL = ("full_attention", "sliding_attention")
_KINDS: Mapping[type, str] = {dict: "an object", list: "a list", str: "a text"}
Form = TypeVar("Form", dict[str, Any], list[Any], str)


def read_shape(directory: Path) -> ModelShape:
    """Return the sizes of the model in a directory, whose weights need not be there.

    Raises:
        PlanError: there is no config.json, or it is not that of a model whose sizes are understood.
    """
    path = directory / CONFIG
    try:
        values = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror or one_line(error)}") from None
    except UNREADABLE as error:
        raise PlanError(f"{path} is not JSON: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise PlanError(f"{path} holds {in_yaml(values)}; expected a JSON object")
    return shape_of(values, name=directory.name, source=str(path))


def shape_of(values: Mapping[str, Any], *, name: str, source: str) -> ModelShape:
    """Return the sizes that the fields of a config.json say. `source`: what a message calls it.

    Raises:
        PlanError: a field is missing or not valid, or the model has layers that are neither attention nor feed-forward.
    """
    whole = _Fields(values, source)
    fields = _Fields(whole.get("text_config", dict) or values, source)  # models of images and text have both
    others = set(map(str, fields.get("layer_types", list) or ())) - set(_FULL)
    if others:
        raise PlanError(f"{source} has layers of type {min(others)}, which cannot be planned for; only attention can")
    family = fields.get("model_type", str)
    if family not in _FAMILIES:
        known = did_you_mean(str(family), _FAMILIES) or f"; known are {', '.join(_FAMILIES)}"
        raise PlanError(f"{source} has the model_type {in_yaml(family)}, whose sizes are not understood{known}")
    if (every := fields.size("decoder_sparse_step", default=1)) > 1:
        raise PlanError(f"{source} has experts in one of {every} layers (decoder_sparse_step); plans have them in all")
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise PlanError(f"{source} has {heads} num_attention_heads, which {kv_heads} num_key_value_heads cannot share")
    if hidden % heads and fields.values.get("head_dim") is None and not fields.values.get("kv_lora_rank"):
        raise PlanError(
            f"{source} has hidden_size {hidden}, which is not divisible by its {heads} num_attention_heads; correct "
            "one of them, or add head_dim"
        )
    experts = _experts(fields)
    return ModelShape(
        name=name,
        layers=fields.size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=fields.size("head_dim", default=hidden // heads or 1),
        intermediate=fields.size("intermediate_size", default=1 if experts else None),
        vocab=fields.size("vocab_size"),
        tied=bool(fields.values.get("tie_word_embeddings", values.get("tie_word_embeddings", False))),
        qkv_bias=bool(fields.values.get("attention_bias", family in _WITH_BIAS)),
        qk_norm=bool(fields.values.get("use_qk_norm", family in _WITH_QK_NORM)),
        context=fields.size("max_position_embeddings", default=32_768),
        experts=experts,
        latent=_latent(fields),
    )


def _experts(fields: "_Fields") -> Experts | None:
    count = next((fields.size(name) for name in _EXPERTS if fields.values.get(name)), 0)
    if count < 2:
        return None
    intermediate = fields.size("moe_intermediate_size", default=fields.values.get("intermediate_size"))
    shared = fields.values.get("shared_expert_intermediate_size") or 0
    shared = shared or intermediate * (fields.values.get("n_shared_experts") or 0)
    only_dense = fields.get("mlp_only_layers", list) or ()
    return Experts(
        count=count,
        per_token=fields.size("num_experts_per_tok"),
        intermediate=intermediate,
        shared_intermediate=int(shared),
        dense_layers=len(only_dense) or int(fields.values.get("first_k_dense_replace") or 0),
    )


def _latent(fields: "_Fields") -> Latent | None:
    if not fields.values.get("kv_lora_rank"):
        return None
    return Latent(
        query_rank=int(fields.values.get("q_lora_rank") or 0),
        kv_rank=fields.size("kv_lora_rank"),
        rope_dim=fields.size("qk_rope_head_dim"),
        nope_dim=fields.size("qk_nope_head_dim"),
        value_dim=fields.size("v_head_dim"),
    )


class _Fields:
    """The fields of a config.json."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self._source = source

    def get(self, name: str, kind: type[Form]) -> Form | None:
        """Return a field of such a kind; None where it is missing or null."""
        value = self.values.get(name)
        if value is None or isinstance(value, kind):
            return value
        raise PlanError(f"{self._source} has {name} {in_yaml(value)}; expected {_KINDS[kind]}")

    def size(self, name: str, default: int | None = None) -> int:
        """Return a field that is a positive integer; `default` where it is missing or null."""
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise PlanError(f"{self._source} has no {name}; is it the config.json of a language model?")
        if type(value) is not int or value < 1:
            raise PlanError(f"{self._source} has {name} {in_yaml(value)}; expected a positive integer")
        return value
