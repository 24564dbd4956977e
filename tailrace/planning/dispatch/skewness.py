"""StreamRL's skewness-aware dispatching, as it is written (section 5.3, Algorithm 2, equation 2).

The longest `alpha` of the samples get engines of their own, which decode small batches, each token quickly. All engines
are taken as equal. `balanced` does without both assumptions.
"""

import math
from collections.abc import Sequence

import numpy as np

from tailrace.planning.dispatch.base import EngineState, Job, Placement, by_length
from tailrace.planning.dispatch.seconds import step_s
from tailrace.planning.remaining import LengthHistory


class Skewness:
    """Algorithm 2, and an even distribution within both kinds of engines, the longest jobs first."""

    name = "streamrl"
    plans = True

    def __init__(self, history: LengthHistory, *, alpha: float = 0.2) -> None:
        """`history`: lengths of responses, D in the paper. `alpha`: the share of samples that are long.

        Raises:
            ValueError: `alpha` is not between 0 and 1.
        """
        if not 0 < alpha < 1:
            raise ValueError(f"alpha is {alpha:g}; give a share between 0 and 1, such as 0.2")
        self._history = history
        self._alpha = alpha

    def place(self, jobs: Sequence[Job], engines: Sequence[EngineState]) -> Placement:
        """See `Policy`."""
        order = by_length(jobs)
        long = order[: round(self._alpha * len(order))]
        regular = order[len(long) :]
        places: list[list[int]] = [[] for _ in engines]
        split = self._split([jobs[job] for job in long], [jobs[job] for job in regular], engines)
        if split:
            _deal(long, places[:split])
            _deal(regular, places[split:])
        else:
            _deal(order, places)
        return Placement(places, [])

    def _split(self, long: Sequence[Job], regular: Sequence[Job], engines: Sequence[EngineState]) -> int:
        """The engines for the long samples, N_l; 0 where a kind is empty or has no engine of its own."""
        if not long or not regular or len(engines) < 2:
            return 0
        lengths = self._history.lengths()
        if not len(lengths):
            lengths = np.array([job.expected_tokens for job in (*long, *regular)])
        p50, p90 = np.percentile(lengths, [50, 90])
        count = len(engines)

        def latency(number: int) -> float:
            return _latency_s(long, p90, engines[:number]) + _latency_s(regular, p50, engines[number:])

        return min(range(1, count), key=latency)


def _latency_s(jobs: Sequence[Job], tokens: float, engines: Sequence[EngineState]) -> float:
    """Equation 2 for one engine of several equal ones: PTL(BS) · L · ⌈M / BS⌉.

    `tokens`: L, the tokens of a response.
    """
    engine = engines[0]
    count = math.ceil(sum(job.samples for job in jobs) / len(engines))  # M
    prompt = sum(job.prompt_tokens for job in jobs) / len(jobs)
    room = engine.replicas * min(engine.slots, int(engine.cache_tokens / (prompt + tokens)))
    size = max(1, min(count, room))  # BS
    return step_s(engine, size, size * (prompt + tokens / 2)) * tokens * math.ceil(count / size)


def _deal(jobs: Sequence[int], places: Sequence[list[int]]) -> None:
    """Distribute jobs in turn."""
    for number, job in enumerate(jobs):
        places[number % len(places)].append(job)
