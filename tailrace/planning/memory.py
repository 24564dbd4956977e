"""Bytes on each device, instant by instant, of the workers of each phase: trainer, engine, reference.

A closed form for each purpose. An instant is a moment of a step at which a worker's memory may be the fullest; the
worst one is named. Bytes are those of tensors; an allocator reserves `RESERVED` times as many, and `CONTEXT_BYTES` are
lost to the device's context.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tailrace.config.base import GIB
from tailrace.config.hardware import DeviceConfig, DType
from tailrace.errors import PlanError
from tailrace.planning.model_shape.base import ModelShape
from tailrace.planning.step_times.training_setup import Head, Layout, MicroBatch, TrainingSetup

RESERVED = 1.05
"""Bytes that an allocator reserves for each byte of `Memory.peak`, with some room: for published runs of each kind of
device, benchmarks/simulator_training.py fits 1.00 to 1.03."""
CONTEXT_BYTES = 1.0 * GIB
"""Bytes of a device that kernels and communication groups take."""

CHUNK_LOGITS = 2**26
"""Logits of a block."""
CHUNK_BYTES = 10
"""Bytes of each: fp32, its gradient, and that in bf16."""
LOGIT_BYTES: Mapping[Head, int] = {"whole": 18, "chunks": 0, "value": 0}
"""Bytes of a logit in the loss: bf16 and fp32, normalized, and the gradients of both of the latter (2 + 4 · 4)."""

Bytes = dict[str, float]
"""Bytes of a device by purpose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The bytes of one worker on each of its devices."""

    worker: str
    """What it is, for messages: the trainer of Qwen3-8B."""
    instants: Mapping[str, Bytes]

    @property
    def worst(self) -> str:
        """The instant with the most bytes."""
        return max(self.instants, key=lambda name: sum(self.instants[name].values()))

    @property
    def peak(self) -> float:
        """The bytes at that instant."""
        return sum(self.instants[self.worst].values())

    @property
    def held(self) -> Bytes:
        """The bytes that are there at every instant."""
        first, *others = self.instants.values()
        return {
            name: min(size, *(other[name] for other in others)) if others else size
            for name, size in first.items()
            if all(name in other for other in others)
        }

    @property
    def document(self) -> dict[str, Any]:
        """The bytes at that instant, for machines."""
        return {"peak_bytes": self.peak, "worst_instant": self.worst}

    def parts_text(self, digits: int) -> str:
        """The three largest parts at that instant, and all others together, in GiB with so many digits."""
        parts = sorted(self.instants[self.worst].items(), key=lambda part: -part[1])
        rest = sum(size for _, size in parts[3:])
        shown = parts[:3] + [("others", rest)] * (rest >= 0.5 * 10**-digits * GIB)
        return ", ".join(f"{name} {size / GIB:.{digits}f}" for name, size in shown)

    def excess(self, device: DeviceConfig, *, reserved: float = RESERVED) -> float:
        """Bytes that a device lacks; negative where some are left."""
        return self.peak * reserved + CONTEXT_BYTES - device.memory_bytes

    def fits(self, device: DeviceConfig, *, reserved: float = RESERVED) -> bool:
        """Whether a device has as much."""
        return self.excess(device, reserved=reserved) <= 0

    def check(self, device: DeviceConfig, kind: str) -> None:
        """Check that it fits on a device. `kind`: its name.

        Raises:
            PlanError: it does not; the message says by how much, when, and what takes the most.
        """
        if (excess := self.excess(device)) <= 0:
            return
        raise PlanError(
            f"{self.worker} lacks {excess / GIB:.1f} GiB on {kind}, which has {device.memory_gib:g}: at the worst "
            f"instant, the {self.worst}, tensors take {self.peak / GIB:.1f} ({self.parts_text(1)}); use more "
            "devices, shard more, or compute less at once"
        )


def trainer_memory(setup: TrainingSetup, batch: MicroBatch) -> Memory:
    """The bytes of a trainer whose largest micro-batch is `batch`; gradients of one before it are there."""
    held, gathered = _held(setup), _gathered(setup)
    between, inside, passing = _activations(setup, batch.tokens)
    instants = {
        "end of the forward pass": held | gathered | {"activations": between + inside},
        "loss": held | gathered | _loss(setup, batch.tokens) | {"activations": between},
        "backward pass of the last layer": {
            **held,
            **gathered,
            **_exchanged(setup, 4 * setup.trained_layer),
            "activations": between + inside,
            "gradients of activations": passing,
        },
        "exchange of a layer's gradients": {
            **held,
            **gathered,
            **_exchanged(setup, (4 + setup.element_bytes) * setup.trained_layer),
            "activations": between,
        },
        "optimizer": held | {"scratch": held["moments"] / 2},  # the root of the second moments
        "weight export": held | {"gathered weights": _exported(setup)},
    }
    return Memory(worker=f"the trainer of {setup.shape.name}", instants=instants)


def _loss(setup: TrainingSetup, tokens: float) -> Bytes:
    """The loss: logits, the last hidden vectors with their gradients in fp32, and the gradient of the head."""
    logits = tokens * setup.shape.vocab / setup.layout.tp * LOGIT_BYTES[setup.head]
    trained = setup.adapters is None and setup.head != "value"
    return {
        "logits": _chunk_bytes(setup, tokens) if setup.head == "chunks" else logits,
        "hidden vectors": tokens * (2 * _vector(setup) + 4 * setup.shape.hidden),
        "exchange buffers": 4 * setup.shape.head_parameters / setup.layout.tp if trained else 0.0,
    }


def _chunk_bytes(setup: TrainingSetup, tokens: float) -> float:
    """Bytes of the logits of a block, or of all where there are fewer."""
    return CHUNK_BYTES * min(CHUNK_LOGITS, tokens * setup.shape.vocab / setup.layout.tp)


def in_turns(each: Mapping[str, Memory]) -> Memory:
    """The bytes of workers that share a device in turns, by what each is called: at an instant of one, the others have
    what they hold at any."""
    instants: dict[str, Bytes] = {}
    for name, memory in each.items():
        others = {other: kept.held for other, kept in each.items() if other != name}
        for instant, own in memory.instants.items():
            parts = {name: own, **others}
            instants[f"{instant} of the {name}"] = {
                f"{purpose} of the {worker}": size for worker, sizes in parts.items() for purpose, size in sizes.items()
            }
    return Memory(worker=" and ".join(memory.worker for memory in each.values()), instants=instants)


def reference_memory(setup: TrainingSetup, batch: MicroBatch) -> Memory:
    """The bytes of a frozen model that computes log-probabilities."""
    weights = {"weights": setup.element_bytes * setup.parameters / setup.layout.shards}
    held = weights | _gathered(setup)
    return Memory(
        worker=f"the reference of {setup.shape.name}",
        instants={
            "forward pass": held | {"activations": batch.tokens * _largest_layer(setup)},
            "log-probabilities": held | {"logits": _chunk_bytes(setup, batch.tokens)},
        },
    )


def engine_memory(
    shape: ModelShape,
    *,
    tp: int,
    cache_tokens: float,
    step_tokens: float,
    batch_size: float,
    dtype: DType = "bfloat16",
) -> Memory:
    """The bytes of an engine on each of its TP ranks.

    `cache_tokens`: room in its KV cache. `step_tokens`: those of its largest step. `batch_size`: sequences that are
    sampled together; their logits and probabilities are fp32.
    """
    setup = TrainingSetup(shape=shape, layout=Layout(tp=tp), dtype=dtype)
    held = {
        "weights": setup.element_bytes * setup.parameters,
        "KV cache": cache_tokens * shape.cache_bytes(tp=tp, element_bytes=setup.element_bytes),
    }
    return Memory(
        worker=f"an engine of {shape.name}",
        instants={
            "largest step": held | {"activations": step_tokens * _largest_layer(setup)},
            "sampling": held | {"logits": batch_size * shape.vocab * 2 * 4.0},
        },
    )


def _held(setup: TrainingSetup) -> Bytes:
    """What is there at any instant."""
    layout = setup.layout
    moments = 1 if layout.sharding == "none" else layout.dp
    if layout.sharding == "full":
        weights = 4 * setup.parameters / layout.dp
    elif setup.dtype == "float32":
        weights = 4 * setup.parameters
    else:  # a copy to compute with
        weights = (setup.element_bytes + 4 / moments) * setup.parameters
    return {
        "weights": weights,
        "gradients": 4 * setup.trained / layout.shards,
        "moments": 8 * setup.trained / moments,
    }


def _gathered(setup: TrainingSetup) -> Bytes:
    """Weights that other devices hold parts of: those of a layer, of the next one, and of the ends."""
    if setup.layout.sharding != "full":
        return {}
    layers = min(2, setup.stage_layers) * setup.layer_parameters
    return {"gathered weights": setup.element_bytes * (layers + setup.end_parameters)}


def _exchanged(setup: TrainingSetup, layer_bytes: float) -> Bytes:
    """Gradients on their way to the devices that keep them. A head that is the embedding, too, keeps its own for long.

    `layer_bytes`: those of a layer: a copy in fp32, and before that is sent what the copy is made of.
    """
    if setup.layout.sharding != "full":
        return {}
    waits = setup.shape.tied and setup.head != "value" and setup.adapters is None
    ends = setup.shape.head_parameters / setup.layout.tp if waits else 0.0
    return {"exchange buffers": layer_bytes + setup.element_bytes * ends}


def _exported(setup: TrainingSetup) -> float:
    """Bytes of the largest weights that are gathered and cast at once: those of a layer, or of an end."""
    largest = max(setup.layer_parameters, setup.shape.head_parameters / setup.layout.tp)
    return largest * setup.element_bytes + (4 * largest if setup.layout.sharding == "full" else 0)


def _activations(setup: TrainingSetup, tokens: float) -> tuple[float, float, float]:
    """Bytes of what the backward pass needs between layers, inside the one that is computed, and on its way back.

    Without checkpointing, the insides of all layers are among the first. A pipeline's first stage keeps as many
    micro-batches as there are stages.
    """
    layout, kinds = setup.layout, _layers(setup)
    kept = layout.pp * setup.stage_layers
    passing = tokens * max(kind.passing for kind in kinds)
    if layout.checkpointing == "none":
        mean = sum(kind.layers * kind.saved for kind in kinds) / setup.shape.layers
        return tokens * kept * mean, 0.0, passing
    inputs = 0 if layout.offload else kept - 1  # that of the layer at work is among its own
    return tokens * inputs * _vector(setup), tokens * _largest_layer(setup), passing


class _Layer(NamedTuple):
    """Bytes of a kind of layer for a token on a TP rank."""

    layers: int
    """How many there are of this kind."""
    saved: float
    """What its forward pass keeps for its backward pass."""
    passing: float
    """The largest gradients that are there at once in its backward pass."""


def _layers(setup: TrainingSetup) -> list[_Layer]:
    """The kinds of layers that the model has.

    A feed-forward part keeps gate, its activation, up, and their product; gradients of three are there at once. Each
    expert keeps what it takes and what it returns, too; the latter is cast to fp32, and weighted there.
    """
    shape, size, tp = setup.shape, setup.element_bytes, setup.layout.tp
    both, passing = _attention_part(setup), 2 * _vector(setup)
    layers = []
    if shape.dense_layers:
        inner = shape.intermediate * size / tp
        layers.append(_Layer(shape.dense_layers, both + 4 * inner, passing + 3 * inner))
    if (experts := shape.experts) is not None:
        rows = experts.per_token * shape.hidden / tp
        inner = (experts.per_token * experts.intermediate + experts.shared_intermediate) * size / tp
        saved = both + 4 * inner + rows * (2 * size + 2 * 4)
        layers.append(_Layer(shape.expert_layers, saved, passing + 3 * inner + rows * (size + 4)))
    return layers


def _largest_layer(setup: TrainingSetup) -> float:
    """Bytes that one layer computes for a token."""
    return max(kind.saved for kind in _layers(setup))


def _attention_part(setup: TrainingSetup) -> float:
    """Bytes that a layer keeps of its input, its residuals, both norms and its attention."""
    return 4 * _vector(setup) + _attention_bytes(setup.shape, setup.element_bytes) / setup.layout.tp


def _vector(setup: TrainingSetup) -> float:
    return setup.shape.hidden * setup.element_bytes


def _attention_bytes(shape: ModelShape, size: float) -> float:
    """Bytes that attention keeps of a token: queries, keys, values, what it returns, and a sum of each head in fp32."""
    if (latent := shape.latent) is not None:
        heads = shape.heads * (2 * (latent.nope_dim + latent.rope_dim) + 2 * latent.value_dim)
        return size * (heads + latent.query_rank + latent.kv_rank + latent.rope_dim) + 4 * shape.heads
    query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return size * (2 * query + 2 * kv + (query + kv) * shape.qk_norm) + 4 * shape.heads
