"""How far predictions of step times are off, apart from the drift of the machine.

Engines measure the points of a profile again, right before and right after each of their batches. Five figures come of
that:

- Drift: by how much the points measured again differ from the profile, as a mean over the points.
- Repeat: by how much they differ before and after a batch, so what the same measurement differs by.
- Model error: how far predictions are off that rest on the points measured again, in the mean of before and after the
  batch that they predict. So it is what interpolation misses, and noise.
- At any size: how far a line between the batch sizes of the profile is off at each size between them, with 96 tokens a
  sequence, in sweeps over all sizes. Each error is of one sweep, and the median of all sweeps counts.
- Prefills: the same at lengths between those of the profile.

All errors are in per cent of what was measured.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from gate import Contestant

from tailrace.planning.curves import Floats
from tailrace.planning.latency import CorrectedPredictor, DecodedStep, LatencyPredictor, Prefills
from tailrace.planning.tp_profile import TPProfile

WINDOW = 16
"""Number of steps whose median is compared with a prediction."""
HALF = 4
"""Steps of a point before a batch, and of one after it."""
SWEEPS = 4

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
        self._points: dict[int, list[list[float]]] = {tp: [] for tp in STATIC}
        """The seconds of a degree's points, before and after each of its batches."""
        self._steps: dict[int, list[list[DecodedStep]]] = {tp: [] for tp in STATIC}
        """The steps of these batches."""
        for key in STATIC.values():
            engines[key].step(task="warm")

    def before(self, engine: str) -> None:
        """Measure the points of an engine's degree, if it is a static one, before its batch."""
        for tp, key in STATIC.items():
            if key == engine:
                self._points[tp].append(self._seconds(tp, decode=_points(self._profile, tp), steps=HALF))

    def after(self, engine: str, steps: Sequence[Sequence[Any]]) -> None:
        """Measure them again after the batch, whose steps these are."""
        self.before(engine)
        for tp, key in STATIC.items():
            if key == engine:
                self._steps[tp].append([DecodedStep(*step) for step in steps])

    def figures(self) -> dict[str, object]:
        """All figures of the module. Those at any batch size, and of prefills, are measured now."""
        return {
            "predictor_error_pct": self._of_trajectories([self._profile] * self._rounds, corrected=False),
            "predictor_error_pct_corrected": self._of_trajectories([self._profile] * self._rounds, corrected=True),
            "predictor_drift_pct": self._drift(),
            "predictor_repeat_pct": self._repeat(),
            "predictor_model_error_pct": {
                **self._of_trajectories(self._again, corrected=False),
                "any_size": self._at_any_size(),
            },
            "prefill_error_pct": self._prefills(),
        }

    def _seconds(self, tp: int, **points: object) -> list[float]:
        seconds: list[float] = self._engines[STATIC[tp]].step(timeout_s=1200, task="measure", **points)["seconds"]
        return seconds

    @property
    def _rounds(self) -> int:
        return min(map(len, self._steps.values()))

    @property
    def _again(self) -> list[TPProfile]:
        """The profile with the seconds of each round."""
        found = []
        for number in range(self._rounds):
            own = {tp: points[2 * number : 2 * number + 2] for tp, points in self._points.items()}
            left = {tp: iter(np.mean(points, axis=0).tolist()) for tp, points in own.items()}
            decode = (msgspec.structs.replace(point, seconds=next(left[point.tp])) for point in self._profile.decode)
            found.append(msgspec.structs.replace(self._profile, decode=tuple(decode)))
        return found

    def _drift(self) -> float:
        return _pct(
            abs(then.seconds - at_first.seconds) / then.seconds
            for again in self._again
            for then, at_first in zip(again.decode, self._profile.decode, strict=True)
        )

    def _repeat(self) -> float:
        return _pct(
            2 * abs(before - after) / (before + after)
            for points in self._points.values()
            for first, second in zip(points[::2], points[1::2], strict=True)
            for before, after in zip(first, second, strict=True)
        )

    def _of_trajectories(self, profiles: Sequence[TPProfile], *, corrected: bool) -> dict[str, float]:
        """The mean over the windows of all batches, by degree. `profiles`: that of each round."""
        return {
            str(tp): _pct(
                error
                for profile, steps in zip(profiles, self._steps[tp], strict=True)
                for error in window_errors(profile, steps, corrected=corrected)
            )
            for tp in STATIC
        }

    def _at_any_size(self) -> dict[str, float]:
        """The mean over all batch sizes between those of the profile, and the worst.

        That is at the size `at` of TP `tp` and so many `replicas`.
        """
        errors: list[float] = []
        worst = (0.0, 0, 0, 0)
        for tp, replicas in sorted({(point.tp, point.replicas) for point in self._profile.decode}):
            own = (point for point in self._profile.decode if (point.tp, point.replicas) == (tp, replicas))
            kept = sorted({point.batch_size for point in own})
            sizes = list(range(kept[0], kept[-1] + 1))
            sweeps = self._sweeps(tp, "decode", [(replicas, size, SHORT) for size in sizes])
            lines = [np.interp(sizes, kept, seconds[np.array(kept) - kept[0]]) for seconds in sweeps]
            off = np.abs(np.median(np.array(lines) / sweeps - 1, axis=0))
            between = [(float(off[size - kept[0]]), size) for size in sizes if size not in kept]
            errors += [error for error, _ in between]
            worst = max(worst, *((error, size, tp, replicas) for error, size in between))
        error, size, tp, replicas = worst
        return {"mean": _pct(errors), "worst": _pct([error]), "at": size, "tp": tp, "replicas": replicas}

    def _prefills(self) -> dict[str, float]:
        """The mean by degree, and the worst, at lengths in the middle between those of the profile, a prompt at a
        time."""
        means: dict[str, float] = {}
        worst = 0.0
        for tp in STATIC:
            known = {point.length: point for point in self._profile.prefill if (point.tp, point.batch_size) == (tp, 1)}
            between = [(low + high) // 2 for low, high in pairwise(sorted(known))]
            lengths = sorted([*known, *between])
            off = []
            for sweep in self._sweeps(tp, "prefill", [(1, length) for length in lengths]):
                seconds = dict(zip(lengths, sweep.tolist(), strict=True))
                predictor = Prefills(
                    msgspec.structs.replace(point, seconds=seconds[length]) for length, point in known.items()
                )
                off.append([predictor.at(1, length) / seconds[length] - 1 for length in between])
            errors = np.abs(np.median(off, axis=0)).tolist()
            means[str(tp)] = _pct(errors)
            worst = max(worst, *errors)
        return {**means, "worst": _pct([worst])}

    def _sweeps(self, tp: int, kind: str, points: Sequence[tuple[int, ...]]) -> list[Floats]:
        """The seconds of these points in sweeps there and back, so that a drift does not bend what is straight."""
        sweeps = []
        for number in range(SWEEPS):
            order = -1 if number % 2 else 1
            sweeps.append(np.array(self._seconds(tp, **{kind: points[::order]}))[::order])
        return sweeps


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
