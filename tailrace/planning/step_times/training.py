"""A trainer's work on packed sequences, added up over operators.

A backward pass has two products for each of the forward pass (one where weights are frozen), and 2.5 times its
attention. Layers that were not kept are computed once more.

    exchange                      when                                    hidden behind
    TP: sums of activations       two a layer in each pass                nothing
    FSDP2: gather of weights      each layer, forward and backward        the layers' computation: the longer counts
    FSDP2: scatter of gradients   each layer, backward                    the same
    DP, ZeRO-1: gradients         once a step                             nothing
    ZeRO-1: gather of weights     once a step                             nothing
    PP: activations, gradients    each micro-batch, between stages        nothing
    offload: inputs of layers     each micro-batch, to the host and back  the layers' computation
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tailrace.errors import PlanError
from tailrace.planning.hardware.base import Pool
from tailrace.planning.packing import GroupPart
from tailrace.planning.step_times.basis import Basis
from tailrace.planning.step_times.collectives import Group, all_gather_s, all_reduce_s, reduce_scatter_s
from tailrace.planning.step_times.operators import Operator, Pass, operators
from tailrace.planning.step_times.rates import Rates, seconds
from tailrace.planning.step_times.training_setup import Head, MicroBatch, TrainingSetup, matrices

INEFFICIENCY: Mapping[str, float] = {"A40": 1.6, "A6000": 1.6, "H100": 2.0, "H200": 1.9}
"""How many times longer than at `TRAINING` all computation but attention takes, by kind of device.

These are the constants that benchmarks/simulator_training.py fits. Its one for B200 is left out: kernels of that time
did not use the device (docs/planning.md). A40 has the chip of A6000, and its constant."""
TYPICAL_INEFFICIENCY = 1.9
"""The same for other kinds."""
_UNSEEN_ERROR = 0.14
"""Nine of ten published runs of these kinds that nothing was fitted on are within this relative error."""

TRAINING = Rates(
    product=0.72,
    grouped=0.72,
    product_memory=0.82,
    attention=0.6,
    attention_memory=0.9,
    memory=0.75,
    exchange=0.75,
    launch_s=2.5e-6,
)
"""Rates on long packed sequences, where each expert has many rows; `INEFFICIENCY` is for these. FlashAttention reaches
about 0.6 there, forward and backward together: version 2 on A100 (Dao 2023, section 4), version 3 on H100 (Shah et al.
2024, section 4)."""

OPTIMIZER_BYTES = 40
"""Bytes of memory for a parameter in AdamW: weight, gradient and moments are read (16) and all but the gradient are
written (12); clipping reads the gradient twice and writes it once (12)."""
LOGIT_BYTES: Mapping[Head, float] = {"whole": 20, "chunks": 32, "value": 0}
"""Bytes of memory for a logit in a forward pass. Whole ones are written in bf16 (2), cast (2 + 4), and normalized by
one kernel (8 + 4). Those in chunks are written and cast; maximum (4), difference, exponential (8 each) and sum (4) are
kernels of their own."""
WEIGHTED_BYTES = 18
"""Bytes of memory for an element of what experts take and return: a row is gathered for its expert (2 + 2), cast and
weighted in fp32 (2 + 4), and added to its token's sum (4 + 4)."""

COPIED_BYTES = 4
"""Bytes of memory for a gathered parameter: it is copied out of what the exchange has brought (2 + 2)."""

_COUNTED_ELSEWHERE = ("head", "logits", "vectors of experts", "attention of prompts")
"""Operators of an engine's pass that a trainer has in another way, or not at all."""

_BACKWARD = {"product": 2.0, "grouped": 2.0, "attention": 2.5, "memory": 2.0, "exchange": 1.0}
"""How many times longer a backward pass takes than the forward pass."""


def training_basis(kind: str) -> Basis:
    """What the times of trainers on a kind of device rest on. One without a constant may be as far from the typical one
    as those that have one."""
    if kind in INEFFICIENCY:
        return Basis(kind="analytic", error=_UNSEEN_ERROR)
    farthest = max(max(one / TYPICAL_INEFFICIENCY, TYPICAL_INEFFICIENCY / one) for one in INEFFICIENCY.values())
    return Basis(kind="analytic", error=(1 + _UNSEEN_ERROR) * farthest - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """Seconds of one stage for one micro-batch."""

    forward: float
    backward: float
    send: float
    """To the next stage; gradients take as long."""

    @property
    def all(self) -> float:
        return self.forward + self.backward + 2 * self.send

    @property
    def score(self) -> float:
        return self.forward + self.send


class AnalyticTrainingTimes:
    """The seconds of a trainer on devices of one pool."""

    def __init__(
        self, setup: TrainingSetup, pool: Pool, *, rates: Rates = TRAINING, inefficiency: float | None = None
    ) -> None:
        """`inefficiency`: see `INEFFICIENCY`; by default that of the kind of device.

        Raises:
            PlanError: the pool has too few devices.
        """
        layout = setup.layout
        if layout.devices > pool.devices:
            raise PlanError(
                f"the layout takes {layout.devices} devices (tp x pp x dp), but the pool {pool.name!r} has "
                f"{pool.devices}; lower a degree"
            )
        self._setup, self._layout, self._pool, self._rates = setup, layout, pool, rates
        typical = INEFFICIENCY.get(pool.kind, TYPICAL_INEFFICIENCY)
        self._inefficiency = typical if inefficiency is None else inefficiency
        self._tp = Group.of(pool, layout.tp)
        self._dp = Group.of(pool, layout.dp, per_node=max(1, pool.per_node // layout.tp))

    def step_s(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Seconds of an update: the micro-batches of the DP rank with the most work, exchanges, and the optimizer."""
        if not micro_batches:
            return 0.0
        return self._piped([self._stage(batch).all for batch in micro_batches]) + self.optimizer_s()

    def update_s(self, micro_batch: Sequence[GroupPart]) -> float:
        """Seconds of a stage's forward and backward pass; see `TrainerTimes`. The bubble is in `step_s` alone."""
        return self._stage(MicroBatch.of_parts(micro_batch)).all

    def score_s(self, micro_batch: Sequence[GroupPart]) -> float:
        """Seconds of a stage's forward pass; see `TrainerTimes`. The bubble is in `log_probs_s` alone."""
        return self._stage(MicroBatch.of_parts(micro_batch)).score

    def log_probs_s(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Seconds until a DP rank has the log-probabilities of all tokens of its micro-batches."""
        return self._piped([self._stage(batch).score for batch in micro_batches])

    def optimizer_s(self) -> float:
        """Seconds of what is done once a step: clipping and AdamW on the parameters whose moments a device keeps, and
        exchanges of gradients and new weights."""
        kept = self._setup.trained / (1 if self._layout.sharding == "none" else self._layout.dp)
        update = Operator(kind="memory", name="optimizer", read_bytes=kept * OPTIMIZER_BYTES)
        return self._gradients_s() + self._sum([update]) + self._weights_s()

    def _piped(self, each: Sequence[float]) -> float:
        """Seconds until the last stage has done all micro-batches: the longest fills and empties the pipeline."""
        return sum(each) + (self._layout.pp - 1) * max(each, default=0.0)

    def _stage(self, batch: MicroBatch) -> _Stage:
        layers, head = list(_layers(self._setup, batch)), list(_head(self._setup, batch))
        of_stage = self._setup.stage_layers / self._setup.shape.layers  # the largest stage sets the pace
        forward, backward = (of_stage * part for part in self._passes(layers))
        if self._layout.checkpointing == "full":
            backward += forward
        ends = self._passes(head)
        moved = self._moved_s(batch)
        again = self._sum(head[:1]) if self._setup.head == "chunks" else 0.0  # the product; passes are in LOGIT_BYTES
        return _Stage(
            forward=max(forward, self._gathered_s, moved) + ends[0],
            backward=max(backward, self._gathered_s + self._scattered_s, moved) + ends[1] + again,
            send=self._send_s(batch),
        )

    def _passes(self, each: Iterable[Operator]) -> tuple[float, float]:
        """Seconds of operators in a forward and in a backward pass."""
        spent = [(self._seconds(operator), self._times(operator)) for operator in each]
        return sum(one for one, _ in spent), sum(one * times for one, times in spent)

    def _sum(self, each: Iterable[Operator]) -> float:
        return sum(map(self._seconds, each))

    def _seconds(self, operator: Operator) -> float:
        ideal = seconds(operator, self._pool.device, self._tp, self._rates, self._setup.dtype)
        return ideal if operator.kind in ("attention", "exchange") else ideal * self._inefficiency

    def _times(self, operator: Operator) -> float:
        frozen = self._setup.adapters is not None and operator.kind in ("product", "grouped")
        return 1.0 if frozen else _BACKWARD[operator.kind]

    @cached_property
    def _gathered_s(self) -> float:
        """Seconds of gathering the weights of a stage in a pass."""
        size = self._setup.element_bytes
        return self._sharded_s(all_gather_s, size * self._setup.layer_parameters, size * self._setup.end_parameters)

    @cached_property
    def _scattered_s(self) -> float:
        """Seconds of exchanging the gradients of a stage in a pass."""
        return self._sharded_s(reduce_scatter_s, 4 * self._setup.trained_layer, 4 * self._setup.trained_ends)

    def _sharded_s(self, exchange: Callable[[float, Group, float], float], layer: float, ends: float) -> float:
        """Seconds of an exchange of each layer by itself, and of the ends."""
        if self._layout.sharding != "full":
            return 0.0
        reach = self._rates.exchange
        return self._setup.stage_layers * exchange(layer, self._dp, reach) + exchange(ends, self._dp, reach)

    def _gradients_s(self) -> float:
        """Seconds of exchanging all gradients once a step."""
        exchange = {"none": all_reduce_s, "optimizer": reduce_scatter_s}.get(self._layout.sharding)
        return 0.0 if exchange is None else exchange(4 * self._setup.trained, self._dp, self._rates.exchange)

    def _weights_s(self) -> float:
        """Seconds of gathering the new weights once a step."""
        if self._layout.sharding != "optimizer":
            return 0.0
        return all_gather_s(self._setup.trained * self._setup.element_bytes, self._dp, self._rates.exchange)

    def _moved_s(self, batch: MicroBatch) -> float:
        """Seconds of moving the inputs of layers to the host, or back."""
        if not self._layout.offload:
            return 0.0
        size = self._setup.stage_layers * batch.tokens * self._setup.shape.hidden * self._setup.element_bytes
        return size / (self._pool.device.host_gb_s * 1e9)

    def _send_s(self, batch: MicroBatch) -> float:
        """Seconds of sending a micro-batch to the next stage."""
        if self._layout.pp == 1:
            return 0.0
        size = batch.tokens * self._setup.shape.hidden * self._setup.element_bytes / self._layout.tp
        return self._pool.link(self._layout.devices).seconds(size)


def _layers(setup: TrainingSetup, batch: MicroBatch) -> Iterator[Operator]:
    """The operators of all layers in a forward pass."""
    shape, size, tp = setup.shape, setup.element_bytes, setup.layout.tp
    m = batch.tokens
    work = Pass(tokens=m, pairs=batch.squares / 2, cached_tokens=m, logits=0)
    for operator in operators(shape, work, tp=tp, element_bytes=size):
        if operator.name not in _COUNTED_ELSEWHERE:
            yield operator
    rotated = m * (shape.heads + shape.kv_heads) * shape.head_dim / tp
    yield Operator(kind="memory", name="rotation", read_bytes=2 * rotated * size, count=shape.layers)
    if (experts := shape.experts) is not None:
        moved = m * experts.per_token * shape.hidden * WEIGHTED_BYTES
        yield Operator(kind="memory", name="permutation", read_bytes=moved, count=shape.expert_layers)
    if setup.layout.sharding == "full":  # gradients are copied in the backward pass, which counts twice
        copied = shape.layers * setup.layer_parameters * COPIED_BYTES
        yield Operator(kind="memory", name="copies", read_bytes=copied)
    if setup.adapters is not None:
        # each matrix's input is read once more; what the adapter returns is written, and added to what the matrix does
        moved = m * sum((one.inputs + 4 * one.outputs) * one.used * one.layers for one in matrices(shape)) * size / tp
        yield Operator(kind="memory", name="adapters", read_bytes=moved, count=1)


def _head(setup: TrainingSetup, batch: MicroBatch) -> Iterator[Operator]:
    """The operators of the head and the loss in a forward pass; the product is the first."""
    vocab = (1 if setup.head == "value" else setup.shape.vocab) / setup.layout.tp
    m, hidden, size = batch.tokens, setup.shape.hidden, setup.element_bytes
    read = (m * hidden + hidden * vocab + m * vocab) * size
    yield Operator(kind="product", name="head", flops=2 * m * hidden * vocab, read_bytes=read)
    yield Operator(kind="memory", name="logits", read_bytes=m * vocab * LOGIT_BYTES[setup.head])
