"""The decoder: embedding, layers, final norm, head. Attention over the cache is handed in, so this file is arithmetic.

Works on packed tokens: T tokens of any number of sequences, without padding.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F

from tailrace.engine.architecture import Architecture
from tailrace.engine.linear import Linear


class Attention(Protocol):
    """What a step attends to."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store k and v of the new tokens, attend with q.

        q: [T, query_heads, head_dim]; k, v: [T, kv_heads, head_dim]; returns [T, query_heads * head_dim].
        """


class Layer:
    """One decoder layer, its projections fused: query, key and value in one matrix, gate and up in another."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype, device: torch.device) -> None:
        a = architecture

        def vector(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        def linear(rows: int, columns: int, *, bias: bool = False) -> Linear:
            return Linear(rows, columns, bias=bias, dtype=dtype, device=device)

        self.input_norm, self.post_norm = vector(a.hidden_size), vector(a.hidden_size)
        self.q_norm, self.k_norm = vector(a.head_dim), vector(a.head_dim)
        self.qkv = linear(sum(a.qkv_sizes), a.hidden_size, bias=a.qkv_bias)
        self.out = linear(a.hidden_size, a.query_heads * a.head_dim, bias=a.out_bias)
        self.gate_up = linear(2 * a.intermediate_size, a.hidden_size)
        self.down = linear(a.hidden_size, a.intermediate_size)

    def load(self, prefix: str, named: Mapping[str, torch.Tensor]) -> None:
        """Copy this layer's weights, named `prefix` + HF name, into the fused matrices."""
        self.input_norm.copy_(named[f"{prefix}input_layernorm.weight"])
        self.post_norm.copy_(named[f"{prefix}post_attention_layernorm.weight"])
        for norm, name in ((self.q_norm, "q_norm"), (self.k_norm, "k_norm")):
            if (weight := named.get(f"{prefix}self_attn.{name}.weight")) is not None:
                norm.copy_(weight)
        parts = [f"{prefix}self_attn.{part}_proj" for part in "qkv"]
        biases = [named[f"{part}.bias"] for part in parts if f"{part}.bias" in named]
        self.qkv.load(torch.cat([named[f"{part}.weight"] for part in parts]), torch.cat(biases) if biases else None)
        self.out.load(named[f"{prefix}self_attn.o_proj.weight"], named.get(f"{prefix}self_attn.o_proj.bias"))
        self.gate_up.load(torch.cat([named[f"{prefix}mlp.{part}_proj.weight"] for part in ("gate", "up")]), None)
        self.down.load(named[f"{prefix}mlp.down_proj.weight"], None)


class Model:
    """A Llama, Qwen2 or Qwen3 decoder. Holds no weights until `load`."""

    def __init__(
        self, architecture: Architecture, *, max_model_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.architecture = architecture
        self.dtype = dtype
        self.device = device
        a = architecture
        self._embedding_VH = torch.empty(a.vocab_size, a.hidden_size, dtype=dtype, device=device)
        self._layers = [Layer(a, dtype, device) for _ in range(a.layers)]
        self._norm = torch.empty(a.hidden_size, dtype=dtype, device=device)
        self._head = Linear(a.vocab_size, a.hidden_size, bias=False, dtype=dtype, device=device)
        self._cos, self._sin = _rope_tables(architecture, max_model_len, dtype, device)

    def load(self, named: Mapping[str, torch.Tensor]) -> None:
        """Replace every weight by those that `weights.check_weights` let pass."""
        embedding = named["model.embed_tokens.weight"]
        self._embedding_VH.copy_(embedding)
        self._head.load(named.get("lm_head.weight", embedding), None)
        self._norm.copy_(named["model.norm.weight"])
        for index, layer in enumerate(self._layers):
            layer.load(f"model.layers.{index}.", named)

    def hidden(self, tokens_T: torch.Tensor, positions_T: torch.Tensor, attend: Attention) -> torch.Tensor:
        """[T, H] after the final norm."""
        cos, sin = self._cos[positions_T], self._sin[positions_T]
        x = F.embedding(tokens_T, self._embedding_VH)
        for index, layer in enumerate(self._layers):
            q, k, v = self._project(layer, self._rms_norm(x, layer.input_norm), cos, sin)
            x = x + layer.out(attend(index, q, k, v))
            gate, up = layer.gate_up(self._rms_norm(x, layer.post_norm)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate).mul_(up))
        return self._rms_norm(x, self._norm)

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """[N, V] in the model's dtype."""
        return self._head(hidden_NH)

    def _project(
        self, layer: Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        a = self.architecture
        heads = layer.qkv(x).view(len(x), -1, a.head_dim)
        qk, v = heads[:, : -a.kv_heads], heads[:, -a.kv_heads :]
        if a.qk_norm:
            q, k = qk[:, : a.query_heads], qk[:, a.query_heads :]
            qk = torch.cat((self._rms_norm(q, layer.q_norm), self._rms_norm(k, layer.k_norm)), dim=1)
        qk = torch.addcmul(qk * cos, qk.roll(a.head_dim // 2, -1), sin)
        return qk[:, : a.query_heads], qk[:, a.query_heads :], v

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.architecture.norm_eps)


def _rope_tables(
    architecture: Architecture, positions: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """[positions, 1, head_dim] each: cosines, and sines whose first half is negated.

    With them x · cos + roll(x, head_dim / 2) · sin rotates the pairs (i, i + head_dim / 2).
    """
    frequencies = architecture.rope.inverse_frequencies(architecture.head_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=-1)
    return cos[:, None].to(device, dtype), sin[:, None].to(device, dtype)
