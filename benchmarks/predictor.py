"""How far predictions of step times are off, apart from the drift of the machine.

Engines measure the points of a profile again in turns with their batches. Three figures come of that:

- Drift: by how much the points measured again differ from the profile, as a mean over the points.
- Model error: how far predictions are off that rest on the points measured again, in the same round as what they
  predict. So it is what interpolation misses, and noise.
- At any size: the same at each batch size, in sweeps over all of them.

All errors are in per cent of what was measured.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from gate import Contestant

from tailrace.planning.latency import CorrectedPredictor, DecodedStep, LatencyPredictor, Prefills
from tailrace.planning.tp_profile import TPProfile

WINDOW = 16
"""Number of steps whose median is compared with a prediction."""
SWEEPS = 3

STATIC = {1: "dp2", 2: "tp2"}
"""The engine that keeps each degree."""
SHORT = 96
"""Cached tokens of each sequence while all batch sizes are measured."""


class Turns:
    """What the engines measure in turns with their batches, and how far predictions were off."""

    def __init__(self, profile: TPProfile, engines: Mapping[str, Contestant]) -> None:
        """`engines`: of adaptive_engine.py, those of `STATIC` among them."""
        self._profile = profile
        self._engines = engines
        self._again: list[TPProfile] = []
        """The profile with the seconds of each round."""
        self._steps: list[dict[int, list[DecodedStep]]] = []
        """The steps of each round's batch, by degree."""

    def measure(self, steps: Mapping[str, Sequence[Sequence[Any]]]) -> None:
        """Measure the points of the profile. `steps`: of the batch before, by engine."""
        self._steps.append({tp: [DecodedStep(*step) for step in steps[key]] for tp, key in STATIC.items()})
        left = {tp: iter(self._seconds(tp, decode=_points(self._profile, tp))) for tp in STATIC}
        decode = tuple(msgspec.structs.replace(point, seconds=next(left[point.tp])) for point in self._profile.decode)
        self._again.append(msgspec.structs.replace(self._profile, decode=decode))

    def figures(self) -> dict[str, object]:
        """All figures of the module. Those at any batch size, and of prefills, are measured now."""
        return {
            "predictor_error_pct": self._of_trajectories([self._profile] * len(self._steps), corrected=False),
            "predictor_error_pct_corrected": self._of_trajectories([self._profile] * len(self._steps), corrected=True),
            "predictor_drift_pct": self._drift(),
            "predictor_model_error_pct": {
                **self._of_trajectories(self._again, corrected=False),
                "any_size": self._at_any_size(),
            },
            "prefill_error_pct": self._prefills(),
        }

    def _seconds(self, tp: int, **points: object) -> list[float]:
        seconds: list[float] = self._engines[STATIC[tp]].step(timeout_s=1200, task="measure", **points)["seconds"]
        return seconds

    def _drift(self) -> float:
        return _pct(
            abs(then.seconds - at_first.seconds) / then.seconds
            for again in self._again
            for then, at_first in zip(again.decode, self._profile.decode, strict=True)
        )

    def _of_trajectories(self, profiles: Sequence[TPProfile], *, corrected: bool) -> dict[str, float]:
        """The mean over the windows of all batches, by degree. `profiles`: that of each round."""
        return {
            str(tp): _pct(
                error
                for profile, steps in zip(profiles, self._steps, strict=True)
                for error in window_errors(profile, steps[tp], corrected=corrected)
            )
            for tp in STATIC
        }

    def _at_any_size(self) -> dict[str, float]:
        """The mean over all batch sizes, and the worst, which is at the size `at` of TP `tp` and so many `replicas`.

        The engines sweep over all sizes, those of the profile among them. Each counts with its median over the sweeps.
        """
        errors: list[float] = []
        worst = (0.0, 0, 0, 0)
        for tp, replicas in sorted({(point.tp, point.replicas) for point in self._profile.decode}):
            own = (point for point in self._profile.decode if (point.tp, point.replicas) == (tp, replicas))
            kept = sorted({point.batch_size for point in own})
            sizes = list(range(kept[0], kept[-1] + 1))
            sweeps = [self._seconds(tp, decode=[(replicas, size, SHORT) for size in sizes]) for _ in range(SWEEPS)]
            seconds = np.median(sweeps, axis=0)
            lines = np.interp(sizes, kept, seconds[np.array(kept) - kept[0]])
            off = (np.abs(lines - seconds) / seconds).tolist()
            errors += off
            worst = max(worst, *((error, size, tp, replicas) for error, size in zip(off, sizes, strict=True)))
        error, size, tp, replicas = worst
        return {"mean": _pct(errors), "worst": _pct([error]), "at": size, "tp": tp, "replicas": replicas}

    def _prefills(self) -> dict[str, float]:
        """The mean by degree, and the worst, at lengths in the middle between those of the profile, a prompt at a time.

        Both kinds of lengths are measured in the same sweeps.
        """
        means: dict[str, float] = {}
        worst = 0.0
        for tp in STATIC:
            known = {point.length: point for point in self._profile.prefill if (point.tp, point.batch_size) == (tp, 1)}
            between = [(low + high) // 2 for low, high in pairwise(sorted(known))]
            lengths = sorted([*known, *between])
            sweeps = [self._seconds(tp, prefill=[(1, length) for length in lengths]) for _ in range(SWEEPS)]
            seconds = dict(zip(lengths, np.median(sweeps, axis=0).tolist(), strict=True))
            predictor = Prefills(
                msgspec.structs.replace(point, seconds=seconds[length]) for length, point in known.items()
            )
            errors = [abs(predictor.at(1, length) / seconds[length] - 1) for length in between]
            means[str(tp)] = _pct(errors)
            worst = max(worst, *errors)
        return {**means, "worst": _pct([worst])}


def window_errors(profile: TPProfile, steps: Sequence[DecodedStep], *, corrected: bool) -> list[float]:
    """The relative error of each window of steps. `corrected`: predictions learn from the steps before."""
    predictor = CorrectedPredictor(LatencyPredictor(profile))
    seen: list[tuple[float, float]] = []
    for step in steps:
        step_s = predictor.step_s if corrected else predictor.base.step_s
        predicted_s = step_s(step.tp, step.batch_size, step.context_tokens, step.replicas, step.others)
        seen.append((step.seconds, predicted_s))
        if corrected:
            predictor.observe(step)
    whole = len(seen) // WINDOW * WINDOW
    measured, predicted = np.median(np.array(seen[:whole]).reshape(-1, WINDOW, 2), axis=1).T
    errors: list[float] = (np.abs(predicted - measured) / measured).tolist()
    return errors


def _points(profile: TPProfile, tp: int) -> list[tuple[int, int, int]]:
    """The decode points of a degree as the task `measure` has them: replicas, batch size, tokens of each sequence."""
    return [
        (point.replicas, point.batch_size, point.context_tokens // point.batch_size)
        for point in profile.decode
        if point.tp == tp
    ]


def _pct(errors: Iterable[float]) -> float:
    return round(100 * statistics.fmean(errors), 2)
