"""One rank's share of the decoder: embedding, layers, final norm, head. Arithmetic alone; attention is handed in.

Works on packed tokens: T tokens of any number of sequences, without padding.
"""

import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F

from tailrace.engine.architecture import Architecture
from tailrace.engine.collectives.base import Collective


class Attention(Protocol):
    """What a step attends to."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store k and v of the new tokens, attend with q.

        q: [T, query_heads, head_dim]; k, v: [T, kv_heads, head_dim]; returns like q.
        """


class Stopwatch:
    """Adds up the time between laps, by what it was spent on."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._last = 0.0

    def start(self) -> None:
        """Begin the first lap."""
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """The time since the last lap was spent on `part`."""
        now = time.perf_counter()
        self._seconds[part] += now - self._last
        self._last = now

    def take(self) -> dict[str, float]:
        """What has been added up since the last call."""
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds


class Layer:
    """One decoder layer, its projections fused: query, key and value in one matrix, gate and up in another."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype, device: torch.device) -> None:
        a = architecture

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.qkv_sizes = list(a.qkv_sizes)
        self.input_norm, self.post_norm = empty(a.hidden_size), empty(a.hidden_size)
        self.q_norm, self.k_norm = empty(a.head_dim), empty(a.head_dim)
        self.qkv = empty(sum(a.qkv_sizes), a.hidden_size)
        self.qkv_bias = empty(sum(a.qkv_sizes)) if a.qkv_bias else None
        self.out = empty(a.hidden_size, a.query_heads * a.head_dim)
        self.out_bias = empty(a.hidden_size) if a.out_bias else None
        self.gate_up = empty(2 * a.intermediate_size, a.hidden_size)
        self.down = empty(a.hidden_size, a.intermediate_size)

    def load(self, prefix: str, named: Mapping[str, torch.Tensor]) -> None:
        """Copy this layer's weights, named `prefix` + HF name."""
        targets = {
            "input_layernorm.weight": self.input_norm,
            "post_attention_layernorm.weight": self.post_norm,
            "self_attn.q_norm.weight": self.q_norm,
            "self_attn.k_norm.weight": self.k_norm,
            "self_attn.o_proj.weight": self.out,
            "self_attn.o_proj.bias": self.out_bias,
            "mlp.down_proj.weight": self.down,
        }
        targets |= zip(("mlp.gate_proj.weight", "mlp.up_proj.weight"), self.gate_up.chunk(2), strict=True)
        for kind, fused in (("weight", self.qkv), ("bias", self.qkv_bias)):
            if fused is not None:
                names = [f"self_attn.{part}_proj.{kind}" for part in "qkv"]
                targets |= zip(names, torch.split(fused, self.qkv_sizes), strict=True)
        for name, target in targets.items():
            if target is not None and prefix + name in named:
                target.copy_(named[prefix + name])


class Model:
    """A shard of a Llama, Qwen2 or Qwen3 decoder. Holds no weights until `load`."""

    def __init__(
        self,
        architecture: Architecture,
        *,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        collective: Collective,
    ) -> None:
        """`architecture`: the shard's own (`sharding.local_architecture`)."""
        self.architecture = a = architecture
        self._collective = collective
        self._embedding_VH = torch.empty(a.vocab_size, a.hidden_size, dtype=dtype, device=device)
        self._head_VH = self._embedding_VH if a.tied else torch.empty_like(self._embedding_VH)
        self._layers = [Layer(a, dtype, device) for _ in range(a.layers)]
        self._norm = torch.empty(a.hidden_size, dtype=dtype, device=device)
        self._cos, self._sin = _rope_tables(architecture, max_model_len, dtype, device)
        self.stopwatch = Stopwatch()

    def load(self, named: Mapping[str, torch.Tensor]) -> None:
        """Replace every weight by the shard's parts (`sharding.shard_weights`)."""
        self._embedding_VH.copy_(named["model.embed_tokens.weight"])
        if not self.architecture.tied:
            self._head_VH.copy_(named["lm_head.weight"])
        self._norm.copy_(named["model.norm.weight"])
        for index, layer in enumerate(self._layers):
            layer.load(f"model.layers.{index}.", named)

    def hidden(self, tokens_T: torch.Tensor, positions_T: torch.Tensor, attend: Attention) -> torch.Tensor:
        """[T, H] after the final norm."""
        lap = self.stopwatch.lap
        self.stopwatch.start()
        cos, sin = self._cos[positions_T], self._sin[positions_T]
        x = self._embed(tokens_T)
        lap("embed")
        for index, layer in enumerate(self._layers):
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
        return self._rms_norm(x, self._norm)

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """[N, V_local] in the model's dtype, those of padding included."""
        logits_NV = F.linear(hidden_NH, self._head_VH)
        self.stopwatch.lap("head")
        return logits_NV

    def _embed(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """[T, H]: each rank looks up the tokens that it has, the others' rows are zero, and the sum is exact."""
        if self._collective.size == 1:
            return F.embedding(tokens_T, self._embedding_VH)
        local_T = tokens_T - self._collective.rank * len(self._embedding_VH)
        outside_T = (local_T < 0) | (local_T >= len(self._embedding_VH))
        x = F.embedding(local_T.masked_fill(outside_T, 0), self._embedding_VH).masked_fill_(outside_T[:, None], 0)
        self._collective.all_reduce(x)
        return x

    def _add(self, x: torch.Tensor, partial: torch.Tensor) -> torch.Tensor:
        """x plus the sum of the ranks' partial results, which is taken in fp32."""
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
