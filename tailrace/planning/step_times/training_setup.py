"""What a trainer trains, in which arrangement, and on how much at once: what its seconds and its bytes follow from."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tailrace.config.hardware import DType
from tailrace.errors import PlanError
from tailrace.planning.model_shape.base import ModelShape
from tailrace.planning.packing import GroupPart
from tailrace.planning.step_times.generation import ELEMENT_BYTES

Sharding = Literal["none", "optimizer", "full"]
Head = Literal["chunks", "whole", "value"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a trainer is spread over `devices`. Neighbours form a TP group; then come DP groups, then PP stages."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    sharding: Sharding = "none"
    """What DP ranks share out: nothing, moments and master weights (ZeRO-1), or weights and gradients too (FSDP2)."""
    checkpointing: Literal["none", "full"] = "none"
    """Full: only the input of each layer is kept, and each layer is computed again in the backward pass."""
    offload: bool = False
    """Whether the inputs of layers wait in the host's memory."""

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp"):
            if (degree := getattr(self, name)) < 1:
                raise PlanError(f"the layout has {name}={degree}; expected 1 or more")
        if self.offload and self.checkpointing == "none":
            raise PlanError(
                "the layout has offload without checkpointing; only where layers are computed again do their inputs "
                "wait on the host: set checkpointing=full"
            )

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.tp * self.pp * self.dp

    @property
    def shards(self) -> int:
        """Parts that the weights of a TP rank are cut into."""
        return self.dp if self.sharding == "full" else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Low-rank adapters (LoRA) beside every matrix of a layer; all else is frozen."""

    rank: int
    kept: int = 1
    """Adapters that are held at once, of which a token goes through one."""

    def __post_init__(self) -> None:
        for name in ("rank", "kept"):
            if (value := getattr(self, name)) < 1:
                raise PlanError(f"adapters have {name}={value}; expected 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Packed sequences that one DP rank computes together."""

    tokens: float
    squares: float
    """The sum of the squared lengths; half of it are the pairs of a token and one that it attends to."""

    @classmethod
    def of(cls, lengths: Iterable[float]) -> "MicroBatch":
        """Sequences of these lengths."""
        each = list(lengths)
        return cls(tokens=sum(each), squares=sum(length * length for length in each))

    @classmethod
    def of_parts(cls, parts: Sequence[GroupPart]) -> "MicroBatch":
        """Samples of groups that each compute their prompt once."""
        return cls(tokens=sum(part.tokens for part in parts), squares=2 * sum(part.pairs for part in parts))


class Matrix(NamedTuple):
    """A matrix of a layer, and the layers that have it."""

    inputs: int
    outputs: int
    layers: int
    copies: int = 1
    """How often a layer has it: experts have one each."""
    used: int = 1
    """How many of these copies a token goes through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """A model, a layout, and what is computed on top. Weights, gradients and moments are fp32.

    A device has its TP rank's part of its stage's layers. Where there are stages, the embedding is on the first of
    them and the head on the last; else both are on each device.
    """

    shape: ModelShape
    layout: Layout = Layout()
    head: Head = "chunks"
    """Logits a block at a time and again in the backward pass, whole fp32 logits, or one value a token (a critic)."""
    adapters: Adapters | None = None
    dtype: DType = "bfloat16"
    """In which layers compute."""

    def __post_init__(self) -> None:
        if self.layout.pp > self.shape.layers:
            raise PlanError(
                f"the layout has pp={self.layout.pp}, but {self.shape.name} has {self.shape.layers} layers; a stage "
                "needs one at least"
            )
        if self.shape.heads % self.layout.tp:
            raise PlanError(
                f"the layout has tp={self.layout.tp}, which does not divide the {self.shape.heads} heads of "
                f"{self.shape.name}; choose a divisor"
            )

    @property
    def element_bytes(self) -> float:
        """Bytes of an element of `dtype`."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def stage_layers(self) -> int:
        """Layers of a stage; the largest, where stages differ."""
        return -(-self.shape.layers // self.layout.pp)

    @property
    def layer_parameters(self) -> float:
        """Parameters of a layer on a TP rank, with all adapters; the mean, where layers differ."""
        shape = self.shape
        attention = shape.attention_parameters + 2 * shape.hidden
        each = attention + shape.feed_forward_parameters / shape.layers
        return each / self.layout.tp + self.layer_adapter_parameters

    @property
    def layer_adapter_parameters(self) -> float:
        """Parameters of a layer's adapters on a TP rank."""
        if self.adapters is None:
            return 0.0
        each = sum((m.inputs + m.outputs) * m.layers * m.copies for m in matrices(self.shape))
        return self.adapters.rank * self.adapters.kept * each / self.shape.layers / self.layout.tp

    @property
    def end_parameters(self) -> float:
        """Parameters of embedding and head on a TP rank."""
        both = self.layout.pp == 1 and not self.shape.tied and self.head != "value"
        return self.shape.head_parameters * (2 if both else 1) / self.layout.tp

    @property
    def parameters(self) -> float:
        """Parameters of a TP rank in a stage: of a device, before DP ranks share them out."""
        return self.stage_layers * self.layer_parameters + self.end_parameters

    @property
    def trained_layer(self) -> float:
        """The trained parameters of `layer_parameters`."""
        return self.layer_parameters if self.adapters is None else self.layer_adapter_parameters

    @property
    def trained_ends(self) -> float:
        """The trained parameters of `end_parameters`."""
        return self.end_parameters if self.adapters is None else 0.0

    @property
    def trained(self) -> float:
        """The trained parameters of `parameters`."""
        return self.stage_layers * self.trained_layer + self.trained_ends


def matrices(shape: ModelShape) -> Iterator[Matrix]:
    """Yield the matrices of the layers that adapters can stand beside: all but routers."""
    hidden, layers = shape.hidden, shape.layers
    query = shape.heads * shape.head_dim
    if (latent := shape.latent) is None:
        yield Matrix(hidden, query, layers)
        yield Matrix(hidden, shape.kv_heads * shape.head_dim, layers, 2, 2)
        yield Matrix(query, hidden, layers)
    else:
        head = latent.nope_dim + latent.rope_dim
        if latent.query_rank:
            yield Matrix(hidden, latent.query_rank, layers)
        yield Matrix(latent.query_rank or hidden, shape.heads * head, layers)
        yield Matrix(hidden, latent.kv_rank + latent.rope_dim, layers)
        yield Matrix(latent.kv_rank, shape.heads * (latent.nope_dim + latent.value_dim), layers)
        yield Matrix(shape.heads * latent.value_dim, hidden, layers)
    if shape.dense_layers:
        yield from _feed_forward(hidden, shape.intermediate, shape.dense_layers)
    if (experts := shape.experts) is not None:
        yield from _feed_forward(hidden, experts.intermediate, shape.expert_layers, experts.count, experts.per_token)
        if experts.shared_intermediate:
            yield from _feed_forward(hidden, experts.shared_intermediate, shape.expert_layers)


def _feed_forward(hidden: int, inner: int, layers: int, copies: int = 1, used: int = 1) -> Iterator[Matrix]:
    yield Matrix(hidden, inner, layers, 2 * copies, 2 * used)
    yield Matrix(inner, hidden, layers, copies, used)
