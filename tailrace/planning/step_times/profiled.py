"""An engine's steps as its own profile has them."""

import math
from collections import defaultdict
from collections.abc import Iterator

from tailrace.planning.curves import Curve
from tailrace.planning.latency import LatencyPredictor
from tailrace.planning.step_times.basis import Basis, within
from tailrace.planning.step_times.operators import Pass
from tailrace.planning.tp_profile import TPProfile

DRIFT = 0.05
"""The relative error where a point was measured: machines drift."""


class ProfiledStepTimes(LatencyPredictor):
    """The steps of the model and the engine that were profiled."""

    def __init__(self, profile: TPProfile) -> None:
        super().__init__(profile)
        self.basis = Basis(kind="profiled", error=DRIFT + within(_left_out(profile)))

    def mixed_s(self, tp: int, batch_size: float, context_tokens: float, chunk: Pass) -> float:
        """Seconds of a step that decodes, and computes a part of prompts in the same pass.

        A profile has none. What all steps have in common, such as reading the weights, is taken to be a step of one
        sequence without a context, and counts once.
        """
        if chunk.tokens <= 0:
            return self.step_s(tp, batch_size, context_tokens, 1)
        prompts = self.prefill_s(tp, 1, chunk.tokens)
        if batch_size <= 0:
            return prompts
        common = min(prompts, self.step_s(tp, 1, 0, 1))
        return self.step_s(tp, batch_size, context_tokens, 1) + prompts - common


def _left_out(profile: TPProfile) -> Iterator[float]:
    """Yield the logarithm of predicted over measured for each point that is between two others, by these alone."""
    curves = defaultdict(list)
    for point in profile.decode:
        curves[point.tp, point.replicas, point.batch_size].append((point.context_tokens, point.seconds))
    for points in curves.values():
        points.sort()
        for index in range(1, len(points) - 1):
            others = Curve.through([points[index - 1], points[index + 1]])
            yield math.log(others.at(points[index][0]) / points[index][1])
