"""The bytes of a training step under FSDP2, as torch tracks them with tensors that have no memory."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from tailrace.planning.model_shape.base import ModelShape


class _Layer(nn.Module):
    """A decoder layer; its norms are those that a CPU computes in one kernel."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        hidden, query, inner = shape.hidden, shape.heads * shape.head_dim, shape.intermediate
        self.heads = shape.heads
        self.before, self.after = nn.LayerNorm(hidden, bias=False), nn.LayerNorm(hidden, bias=False)
        self.queries, self.keys, self.values = (nn.Linear(hidden, query, bias=False) for _ in range(3))
        self.output = nn.Linear(query, hidden, bias=False)
        self.gate, self.up = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        h = self.before(x)
        query, key, value = (
            matrix(h).view(batch, tokens, self.heads, -1).transpose(1, 2)
            for matrix in (self.queries, self.keys, self.values)
        )
        attended = scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
        x = x + self.output(attended.reshape(batch, tokens, -1))
        h = self.after(x)
        x = x + self.down(silu(self.gate(h)) * self.up(h))
        return x


class _Model(nn.Module):
    def __init__(self, shape: ModelShape, *, checkpointing: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.layers))
        self.checkpointing = checkpointing

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        return x


def tracked(shape: ModelShape, *, tokens: int, devices: int, checkpointing: bool) -> dict[str, float]:
    """The bytes by torch's names of purposes, at the peak of the second step. The loss is a sum of hidden states.

    `kept`: the activations that the first backward pass of a layer finds.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=devices)
    try:
        mesh = init_device_mesh("cpu", (devices,))
        with FakeTensorMode():
            return _tracked(_Model(shape, checkpointing=checkpointing), torch.zeros(1, tokens, dtype=torch.long), mesh)
    finally:
        dist.destroy_process_group()


def _tracked(model: _Model, ids: Tensor, mesh: Any) -> dict[str, float]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)  # the tracker counts foreach wrongly
    for _ in range(2):
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((ids,))
        with tracker:
            model(ids).float().sum().backward()  # fp32 gradients, as of a loss
            optimizer.step()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    last = tracker.memory_tracking[model.layers[-1]].snapshots
    state = next(
        each for each in last if each.value == ("Post-Forward AC" if model.checkpointing else "Before Pre-Backward")
    )
    (found,) = last[state][0].values()
    sizes = {getattr(name, "value", name): float(size) for name, size in peak.items()}
    activations = next(size for name, size in found.items() if getattr(name, "value", name) == "Activation")
    return {**sizes, "kept": float(activations)}
