"""How far predictions of step times are off, apart from the drift of the machine.

- Error: how far the profile is off from the steps of whole batches.
- Drift: by how much its points differ from the same points, measured again before and after each batch.
- Repeat: by how much they differ before and after a batch, so what the same measurement differs by.
- Model error: what interpolation misses. A step of a batch is measured again, in turns with the few points that its
  prediction rests on, all within half a second. The prediction by these points is compared with it. Even then a
  measurement differs by several per cent from the one before. So the median of many turns counts: of as many as its
  standard error takes to fall below half a per cent.
- At any size: the same of each batch size between those of the profile, with 96 tokens a sequence. A few turns of each
  tell the worst, which then have as many turns.
- Prefills: how far prefills between the lengths of the profile are off, in sweeps over all lengths. Each error is of
  one sweep, and the median of all sweeps counts.

All errors are in per cent of what was measured.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from gate import Contestant

from tailrace.planning.latency import CorrectedPredictor, DecodedStep, LatencyPredictor, Prefills
from tailrace.planning.tp_profile import DecodePoint, TPProfile

WINDOW = 16
"""Number of steps whose median is compared with a prediction."""
SHORT_STEPS = 4
"""Steps of a measurement that is repeated soon."""
STATES = 16
"""Steps of the batches of each degree that are measured again."""
FEW_TURNS, LEAST_TURNS, MOST_TURNS = 3, 12, 80
STANDARD_ERROR = 0.005
"""Of a step's model error. Turns end when it is as small, between the least and the most of them."""
WORST = 8
SWEEPS = 9

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
                points = [_point(point) for point in self._profile.decode if point.tp == tp]
                self._points[tp].append(self._seconds(tp, decode=points, steps=SHORT_STEPS))

    def after(self, engine: str, steps: Sequence[Sequence[Any]]) -> None:
        """Measure them again after the batch, whose steps these are."""
        self.before(engine)
        for tp, key in STATIC.items():
            if key == engine:
                self._steps[tp].append([DecodedStep(*step) for step in steps])

    def figures(self) -> dict[str, object]:
        """All figures of the module. The last two are measured now."""
        return {
            "predictor_error_pct": self._of_trajectories(corrected=False),
            "predictor_error_pct_corrected": self._of_trajectories(corrected=True),
            "predictor_drift_pct": self._drift(),
            "predictor_repeat_pct": self._repeat(),
            "predictor_model_error_pct": {
                **{str(tp): _pct(self._model_error(state) for state in self._states(tp)) for tp in STATIC},
                "any_size": self._at_any_size(),
            },
            "prefill_error_pct": self._prefills(),
        }

    def _seconds(self, tp: int, **points: object) -> list[float]:
        seconds: list[float] = self._engines[STATIC[tp]].step(timeout_s=1200, task="measure", **points)["seconds"]
        return seconds

    def _drift(self) -> float:
        return _pct(
            abs(again - point.seconds) / again
            for tp, measured in self._points.items()
            for all_again in measured
            for again, point in zip(all_again, (p for p in self._profile.decode if p.tp == tp), strict=True)
        )

    def _repeat(self) -> float:
        return _pct(
            2 * abs(before - after) / (before + after)
            for points in self._points.values()
            for first, second in zip(points[::2], points[1::2], strict=True)
            for before, after in zip(first, second, strict=True)
        )

    def _of_trajectories(self, *, corrected: bool) -> dict[str, float]:
        """The mean over the windows of all batches, by degree."""
        return {
            str(tp): _pct(
                error for steps in batches for error in window_errors(self._profile, steps, corrected=corrected)
            )
            for tp, batches in self._steps.items()
        }

    def _states(self, tp: int) -> list[DecodedStep]:
        """Steps of a degree's batches, as far from each other as they can be."""
        steps = [step for batch in self._steps[tp] for step in batch]
        return [steps[int(place)] for place in np.linspace(0, len(steps) - 1, STATES)]

    def _at_any_size(self) -> dict[str, float]:
        """The mean over all batch sizes between those of the profile, and the worst.

        That is at the size `at` of TP `tp` and so many `replicas`.
        """
        found: list[tuple[float, DecodedStep]] = []
        for tp, replicas in sorted({(point.tp, point.replicas) for point in self._profile.decode}):
            own = (point for point in self._profile.decode if (point.tp, point.replicas) == (tp, replicas))
            kept = sorted({point.batch_size for point in own})
            for size in sorted({*range(kept[0], kept[-1])} - {*kept}):
                state = DecodedStep(tp, size, size * SHORT, replicas, seconds=0.0)
                found.append((self._model_error(state, most=FEW_TURNS), state))
        again = [(self._model_error(state), state) for _, state in sorted(found, reverse=True)[:WORST]]
        error, worst = max(again)
        where = {"at": worst.batch_size, "tp": worst.tp, "replicas": worst.replicas}
        return {"mean": _pct(error for error, _ in found), "worst": _pct([error]), **where}

    def _model_error(self, state: DecodedStep, *, most: int = MOST_TURNS) -> float:
        """The part by which the prediction of a step is off that rests on points measured at the same time.

        `most`: turns in which it is measured.
        """
        decode = self._profile.decode
        bearing = [number for number in range(len(decode)) if _bears(self._profile, number, state)]
        points = [*(_point(decode[number]) for number in bearing), _point(state)]
        off: list[float] = []
        while len(off) < most and not (len(off) >= LEAST_TURNS and _error_of_median(off) <= STANDARD_ERROR):
            order = -1 if len(off) % 2 else 1
            *those, seconds = self._seconds(state.tp, decode=points[::order], steps=SHORT_STEPS)[::order]
            again = _with_seconds(self._profile, dict(zip(bearing, those, strict=True)))
            off.append(_predicted_s(again, state) / seconds - 1)
        error = abs(statistics.median(off))
        if most == MOST_TURNS:
            replicas, length = state.replicas, state.context_tokens // state.batch_size
            where = f"{replicas} x TP {state.tp}, {state.batch_size} x {length}"
            print(f"model error: {where}: {_pct([error])} % in {len(off)} turns", flush=True)
        return error

    def _prefills(self) -> dict[str, float]:
        """The mean by degree, and the worst, at lengths in the middle between those of the profile, a prompt at a
        time. The worst is at so many tokens, under this TP."""
        means: dict[str, float] = {}
        worst = (0.0, 0, 0)
        for tp in STATIC:
            known = {point.length: point for point in self._profile.prefill if (point.tp, point.batch_size) == (tp, 1)}
            between = [(low + high) // 2 for low, high in pairwise(sorted(known))]
            lengths = sorted([*known, *between])
            off = []
            for number in range(SWEEPS):
                order = -1 if number % 2 else 1
                sweep = self._seconds(tp, prefill=[(1, length) for length in lengths[::order]])[::order]
                seconds = dict(zip(lengths, sweep, strict=True))
                predictor = Prefills(
                    msgspec.structs.replace(point, seconds=seconds[length]) for length, point in known.items()
                )
                off.append([predictor.at(1, length) / seconds[length] - 1 for length in between])
            errors = np.abs(np.median(off, axis=0)).tolist()
            means[str(tp)] = _pct(errors)
            worst = max(worst, *((error, length, tp) for error, length in zip(errors, between, strict=True)))
        error, length, tp = worst
        return {**means, "worst": _pct([error]), "at": length, "tp": tp}


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


def _point(of: DecodePoint | DecodedStep) -> tuple[int, int, int, int | None]:
    """Replicas, batch size, tokens of each sequence, and the others' batch size, as the task `measure` has them."""
    others = of.others if isinstance(of, DecodedStep) else None
    return of.replicas, of.batch_size, of.context_tokens // of.batch_size, None if others is None else round(others)


def _predicted_s(profile: TPProfile, state: DecodedStep) -> float:
    return LatencyPredictor(profile).step_s(
        state.tp, state.batch_size, state.context_tokens, state.replicas, state.others
    )


def _with_seconds(profile: TPProfile, seconds: Mapping[int, float]) -> TPProfile:
    """The profile with other seconds of some points, by their number."""
    decode = tuple(
        msgspec.structs.replace(point, seconds=seconds.get(number, point.seconds))
        for number, point in enumerate(profile.decode)
    )
    return msgspec.structs.replace(profile, decode=decode)


def _bears(profile: TPProfile, number: int, state: DecodedStep) -> bool:
    """Whether the prediction of a step rests on this point."""
    if profile.decode[number].tp != state.tp:
        return False
    longer = _with_seconds(profile, {number: 1.01 * profile.decode[number].seconds})
    return not math.isclose(_predicted_s(longer, state), _predicted_s(profile, state), rel_tol=1e-9)


def _error_of_median(values: Sequence[float]) -> float:
    """The standard error of the median of values that are normal but for outliers."""
    low, high = np.quantile(values, [0.25, 0.75])
    deviation = (high - low) / 1.349
    return float(1.2533 * deviation / math.sqrt(len(values)))


def _pct(errors: Iterable[float]) -> float:
    return round(100 * statistics.fmean(errors), 2)
