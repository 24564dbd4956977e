"""An engine's steps, added up over operators: the analytic half of AsyncFlow's cost model (section 4.3)."""

from tailrace.config.hardware import DType
from tailrace.planning.hardware.base import Pool
from tailrace.planning.model_shape.base import ModelShape
from tailrace.planning.step_times.basis import Basis
from tailrace.planning.step_times.collectives import Group
from tailrace.planning.step_times.operators import Pass, decode, joined, operators, prefill
from tailrace.planning.step_times.rates import DEFAULT, ERROR, NO_HOST, Host, Rates, seconds

ELEMENT_BYTES: dict[DType, float] = {"bfloat16": 2.0, "float8": 1.0, "float32": 4.0}


class AnalyticStepTimes:
    """The steps of engines of one pool. A step has as many operators as the model has, whatever the engine."""

    basis = Basis(kind="analytic", error=ERROR)

    def __init__(
        self,
        shape: ModelShape,
        pool: Pool,
        *,
        rates: Rates = DEFAULT,
        dtype: DType = "bfloat16",
        cache_dtype: DType | None = None,
        host: Host = NO_HOST,
    ) -> None:
        """`dtype`: of the weights. `cache_dtype`: of keys and values; by default that of vectors, see `operators`."""
        self._shape = shape
        self._pool = pool
        self._rates = rates
        self._dtype: DType = dtype
        self._cache_bytes = None if cache_dtype is None else ELEMENT_BYTES[cache_dtype]
        self._host = host

    def step_s(self, tp: int, batch_size: float, context_tokens: float, replicas: int) -> float:
        """Seconds of a decode step; see `StepTimes`. Replicas do not disturb each other."""
        return self.pass_s(tp, decode(batch_size, context_tokens))

    def prefill_s(self, tp: int, batch_size: float, rms_length: float) -> float:
        """Seconds of a prefill; see `StepTimes`."""
        return self.pass_s(tp, prefill(batch_size, rms_length))

    def mixed_s(self, tp: int, batch_size: float, context_tokens: float, chunk: Pass) -> float:
        """Seconds of a step that decodes, and computes a part of prompts in the same pass."""
        return self.pass_s(tp, joined(decode(batch_size, context_tokens), chunk))

    def pass_s(self, tp: int, work: Pass) -> float:
        """Seconds of any pass."""
        if work.tokens <= 0:
            return 0.0
        group = Group.of(self._pool, tp)
        size = ELEMENT_BYTES[self._dtype]
        each = operators(self._shape, work, tp=tp, element_bytes=size, cache_bytes=self._cache_bytes)
        device, rates = self._pool.device, self._rates
        return self._host.seconds(work.logits) + sum(
            seconds(operator, device, group, rates, self._dtype) for operator in each
        )
