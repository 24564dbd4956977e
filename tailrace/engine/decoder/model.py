"""One rank's share of the decoder: embedding, layers, final norm, head. Only arithmetic: attention is passed in.

It works on packed tokens: T tokens of any number of sequences, without padding.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from tailrace.engine.collectives.base import Collective
from tailrace.engine.decoder.packing import Group
from tailrace.engine.model.rope import inverse_frequencies
from tailrace.host.stopwatch import Stopwatch
from tailrace.models.architecture import Architecture

RopeTables = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines by position."""


class Attention(Protocol):
    """The attention of one step."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store k and v of the new tokens, attend with q.

        q: [T, query_heads, head_dim]; k, v: [T, kv_heads, head_dim]; returns like q.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer, its projections fused: query, key and value in one matrix, gate and up in another."""

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    out_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


class Model:
    """A shard of a Llama, Qwen2 or Qwen3 decoder, without weights until `use`."""

    def __init__(self, architecture: Architecture, *, rope: RopeTables, collective: Collective) -> None:
        """Make a shard without weights. `architecture` is the shard's own (`sharding.local_architecture`)."""
        self.architecture = architecture
        self._collective = collective
        self._ends: dict[str, torch.Tensor] = {}
        self._layers: dict[int, Layer] = {}
        self._cos, self._sin = rope
        self.stopwatch = Stopwatch()

    def use(self, group: Group, fused: Mapping[str, torch.Tensor]) -> None:
        """Compute with these weights of the group from now on."""
        if isinstance(group, str):
            self._ends[group] = fused[group]
        else:
            self._layers[group] = Layer(**fused)

    def forget(self, group: Group) -> None:
        """Drop the group's weights."""
        if isinstance(group, str):
            del self._ends[group]
        else:
            del self._layers[group]

    def hidden(self, tokens_T: torch.Tensor, positions_T: torch.Tensor, attend: Attention) -> torch.Tensor:
        """Return the hidden states after the final norm, [T, H]."""
        lap = self.stopwatch.lap
        self.stopwatch.start()
        cos, sin = self._cos[positions_T], self._sin[positions_T]
        x = self._embed(tokens_T)
        lap("embed")
        for index in range(self.architecture.layers):
            layer = self._layers[index]
            q, k, v = self._project(layer, self._rms_norm(x, layer.input_norm), cos, sin)
            lap("qkv")
            attended = attend(index, q, k, v).flatten(1)
            lap("attention")
            partial = F.linear(attended, layer.out, layer.out_bias)
            lap("out")
            x = self._add(x, partial)
            lap("all_reduce")
            gate, up = F.linear(self._rms_norm(x, layer.post_norm), layer.gate_up).chunk(2, dim=-1)
            partial = F.linear(F.silu(gate).mul_(up), layer.down)
            lap("mlp")
            x = self._add(x, partial)
            lap("all_reduce")
        return self._rms_norm(x, self._ends["norm"])

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Return logits in the model's dtype, [N, V_local], those of padding included."""
        logits_NV = F.linear(hidden_NH, self._ends["embedding" if self.architecture.tied else "head"])
        self.stopwatch.lap("head")
        return logits_NV

    def _embed(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """Embed the tokens, [T, H]. Each rank looks up the tokens that it has, and the sum over the ranks is exact."""
        embedding_VH = self._ends["embedding"]
        if self._collective.size == 1:
            return F.embedding(tokens_T, embedding_VH)
        local_T = tokens_T - self._collective.rank * len(embedding_VH)
        outside_T = (local_T < 0) | (local_T >= len(embedding_VH))
        x = F.embedding(local_T.masked_fill(outside_T, 0), embedding_VH).masked_fill_(outside_T[:, None], 0)
        self._collective.all_reduce(x)
        return x

    def _add(self, x: torch.Tensor, partial: torch.Tensor) -> torch.Tensor:
        """Return x plus the sum of the ranks' partial results, which is taken in fp32."""
        if self._collective.size > 1:
            partial = partial.float()
            self._collective.all_reduce(partial)
        return (x + partial).to(x.dtype)

    def _project(
        self, layer: Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        a = self.architecture
        heads = F.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, a.head_dim)
        qk, v = heads[:, : -a.kv_heads], heads[:, -a.kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk[:, : a.query_heads], qk[:, a.query_heads :]
            qk = torch.cat((self._rms_norm(q, layer.q_norm), self._rms_norm(k, layer.k_norm)), dim=1)
        qk = torch.addcmul(qk * cos, qk.roll(a.head_dim // 2, -1), sin)
        return qk[:, : a.query_heads], qk[:, a.query_heads :], v

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.architecture.norm_eps)


def rope_tables(architecture: Architecture, positions: int, dtype: torch.dtype, device: torch.device) -> RopeTables:
    """Make cosines, and sines whose first half is negated, [positions, 1, head_dim] each.

    With them x · cos + roll(x, head_dim / 2) · sin rotates the pairs (i, i + head_dim / 2).
    """
    frequencies = inverse_frequencies(architecture.rope, architecture.head_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=-1)
    return cos[:, None].to(device, dtype), sin[:, None].to(device, dtype)
