"""Analytic step times, scaled by measured ones: AsyncFlow's hybrid cost model (section 4.3).

An analytic decode step has three parts: that of one sequence without a context, what more sequences add, and what their
context adds. Each part is multiplied by a factor of its own. The factors are fitted to the relative errors of the
measured steps, for each TP degree, and are within the ratios of measured to analytic that were seen. So what is
predicted grows with batch and context as the analytic step does, wherever that is: beyond the measured points, and for
other models of the same hardware. The prefill has one factor, the geometric mean of its ratios.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tailrace.errors import PlanError
from tailrace.planning.step_times.basis import Basis, Source, within
from tailrace.planning.step_times.operators import Pass
from tailrace.planning.tp_profile import DecodePoint, PrefillPoint

Array = npt.NDArray[np.float64]
_ROUNDS = 1000
_ENOUGH = 1e-9
"""A change of all factors below this ends the fit."""


class Measured(Protocol):
    """Measured steps: a `TPProfile`, for example."""

    @property
    def decode(self) -> Sequence[DecodePoint]:
        """Decode steps."""
        ...

    @property
    def prefill(self) -> Sequence[PrefillPoint]:
        """Prefills; there may be none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """Measured over analytic, of the parts of a step."""

    base: float
    """Of a step of one sequence without a context."""
    batch: float
    """Of what more sequences add."""
    context: float
    """Of what their context adds."""
    prefill: float


class CalibratedStepTimes:
    """Analytic step times with factors. A degree that was not measured has those of the nearest one."""

    def __init__(self, analytic: Source, factors: dict[int, Factors], error: float) -> None:
        """`factors`: by TP degree. `error`: see `Basis`."""
        self._analytic = analytic
        self.factors = factors
        self.basis = Basis(kind="calibrated", error=error)

    @classmethod
    def fitted(cls, analytic: Source, measured: Measured) -> "CalibratedStepTimes":
        """Step times with factors fitted to measured steps of the model and the hardware of `analytic`.

        Raises:
            PlanError: nothing was measured, or the analytic time of a measured step is 0.
        """
        degrees = sorted({point.tp for point in measured.decode})
        if not degrees:
            raise PlanError("there are no measured decode steps to calibrate with; measure some")
        found = cls(analytic, {tp: _fitted(analytic, measured, tp) for tp in degrees}, 0.0)
        errors = (math.log(found._decode_s(point) / point.seconds) for point in measured.decode)
        return cls(analytic, found.factors, within(errors))

    def of(self, analytic: Source) -> "CalibratedStepTimes":
        """The same factors for another model on the same hardware."""
        return CalibratedStepTimes(analytic, self.factors, self.basis.error)

    def step_s(
        self, tp: int, batch_size: float, context_tokens: float, replicas: int, others: float | None = None
    ) -> float:
        """Seconds of a decode step; see `StepTimes`."""
        factors = self._near(tp)
        base, batch, context = _parts(self._analytic, tp, batch_size, context_tokens, replicas)
        return factors.base * base + factors.batch * batch + factors.context * context

    def prefill_s(self, tp: int, batch_size: float, rms_length: float) -> float:
        """Seconds of a prefill; see `StepTimes`."""
        return self._near(tp).prefill * self._analytic.prefill_s(tp, batch_size, rms_length)

    def mixed_s(self, tp: int, batch_size: float, context_tokens: float, chunk: Pass) -> float:
        """Seconds of a step that decodes, and computes a part of prompts in the same pass."""
        step = self._analytic.step_s(tp, batch_size, context_tokens, 1)
        added = self._analytic.mixed_s(tp, batch_size, context_tokens, chunk) - step
        return self.step_s(tp, batch_size, context_tokens, 1) + self._near(tp).prefill * added

    def _near(self, tp: int) -> Factors:
        return self.factors[min(self.factors, key=lambda degree: abs(math.log(degree / tp)))]

    def _decode_s(self, point: DecodePoint) -> float:
        return self.step_s(point.tp, point.batch_size, point.context_tokens, point.replicas)


def _fitted(analytic: Source, measured: Measured, tp: int) -> Factors:
    points = [point for point in measured.decode if point.tp == tp]
    parts = [_parts(analytic, tp, p.batch_size, p.context_tokens, p.replicas) for p in points]
    if min(map(sum, parts)) <= 0:
        raise PlanError(f"the analytic time of a measured step of TP {tp} is 0; calibrate with other steps")
    relative = np.array(parts) / np.array([[point.seconds] for point in points])
    base, batch, context = _bounded_fit(relative)
    ratios = [
        math.log(p.seconds / analytic.prefill_s(tp, p.batch_size, p.length)) for p in measured.prefill if p.tp == tp
    ]
    prefill = math.exp(sum(ratios) / len(ratios)) if ratios else base
    return Factors(base=base, batch=batch, context=context, prefill=prefill)


def _bounded_fit(relative: Array) -> tuple[float, float, float]:
    """The factors whose products with the columns of [n, 3] add up to 1 in each row, as nearly as they can.

    Least squares by coordinate descent, within the least and the largest factor that would suit a row alone.
    """
    each = 1 / relative.sum(axis=1)
    low, high = float(each.min()), float(each.max())
    factors = np.full(relative.shape[1], float(np.median(each)))
    squares = (relative**2).sum(axis=0)
    for _ in range(_ROUNDS):
        before = factors.copy()
        for column in np.flatnonzero(squares):
            left = 1 - relative @ factors + relative[:, column] * factors[column]
            factors[column] = np.clip(relative[:, column] @ left / squares[column], low, high)
        if np.abs(factors - before).max() < _ENOUGH:
            break
    base, batch, context = map(float, factors)
    return base, batch, context


def _parts(
    analytic: Source, tp: int, batch_size: float, context_tokens: float, replicas: int
) -> tuple[float, float, float]:
    base = analytic.step_s(tp, min(1.0, batch_size), 0.0, replicas)
    batch = analytic.step_s(tp, batch_size, 0.0, replicas)
    return base, batch - base, analytic.step_s(tp, batch_size, context_tokens, replicas) - batch
