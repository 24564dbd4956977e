"""Lengths by learning to rank: boosted trees on the figures of `features`, fitted to the order of lengths (LambdaMART).

Burges 2010, "From RankNet to LambdaRank to LambdaMART: An Overview". The trees tell an order and no lengths. So the
prompts are in two halves. Each half has trees of its own, and an increasing function from the scores that these give
the other half to its log-lengths. A prompt is expected to have the mean of what the two halves give.

LightGBM is an extra: pip install "tailrace[lightgbm]".
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tailrace.errors import ConfigError
from tailrace.planning.lengths.base import UNKNOWN, Asked, Expectation, Finished
from tailrace.planning.lengths.figures import ByFigures, Figures, half_of
from tailrace.planning.lengths.ridge import Array
from tailrace.planning.lengths.text import TextFigures

_LEAST = 64
"""Fewer responses are not worth a fit."""
_NEW_SHARE = 0.1
"""All is fitted again once the responses are that much newer."""
_GRADES = 16
"""Lengths are compared by so many quantiles."""
_TREES = 60
_LEAVES = 15


class _Known(NamedTuple):
    """A finished response."""

    prompt_id: str
    figures: Figures
    log: float
    """Of its tokens."""


class _Half(NamedTuple):
    """Trees of one half, and what their scores mean on the other."""

    trees: Any
    scores: Array
    """[n] ascending."""
    logs: Array
    """[n] log-lengths that belong to them."""


class Lambdarank(ByFigures):
    """See the module."""

    name = "lambdarank"

    def __init__(self, *, words: int = 256, most: int = 4096) -> None:
        """`words`: see `TextFigures`. `most`: responses that it learns from, the newest ones.

        Raises:
            ConfigError: LightGBM is not there.
        """
        try:
            import lightgbm
        except (ImportError, OSError) as error:  # the latter where the system lacks OpenMP
            raise ConfigError(
                f'rollout.lengths.type lambdarank needs LightGBM ({error}); pip install "tailrace[lightgbm]"'
            ) from None
        super().__init__()
        self._lightgbm = lightgbm
        self._figures = TextFigures(words)
        self._responses: deque[_Known] = deque(maxlen=most)
        self._came = self._fitted = 0
        """Responses so far, and before the last fit."""
        self._halves: list[_Half] = []
        self._deviation = UNKNOWN[1]
        self.knowledge = f"the newest responses, by {self._figures.knowledge}"

    def figures_of(self, prompts: Sequence[Asked]) -> Sequence[Figures]:
        """See `ByFigures`."""
        return self._figures(prompts)

    def fit(self) -> None:
        """See `ByFigures`."""
        came, responses = self._came, list(self._responses)
        if len(responses) >= _LEAST and came - self._fitted >= _NEW_SHARE * len(responses):
            self._fit(responses)
            self._fitted = came

    def knows(self, prompt: Asked) -> bool:
        """See `LengthPredictor`."""
        return bool(self._halves)

    def expect(self, prompts: Sequence[Asked]) -> list[Expectation]:
        """See `LengthPredictor`. A prompt that was not prepared is expected to be like all others."""
        halves = self._halves
        if not halves:
            return [Expectation.of(*UNKNOWN)] * len(prompts)
        typical = float(np.mean([half.logs.mean() for half in halves]))
        known = [(place, self._known.get(prompt.prompt_id)) for place, prompt in enumerate(prompts)]
        places = [place for place, figures in known if figures is not None]
        means = np.full(len(prompts), typical)
        if places:
            rows = np.stack([figures for _, figures in known if figures is not None])
            means[places] = np.mean([_mapped(half, rows) for half in halves], axis=0)
        return [Expectation.of(float(mean), self._deviation) for mean in means]

    def learn(self, finished: Sequence[Finished]) -> None:
        """See `LengthPredictor`."""
        for response in finished:
            figures = self._known.get(response.asked.prompt_id)
            if figures is not None:
                self._responses.append(_Known(response.asked.prompt_id, figures, math.log(response.tokens)))
                self._came += 1

    def state(self) -> bytes:
        """See `LengthPredictor`: the responses, from which all is fitted again."""
        responses = list(self._responses)  # at once: others may learn meanwhile, in another thread
        rows = [(known.prompt_id, known.figures.tobytes(), known.log) for known in responses]
        return msgspec.msgpack.encode(rows)

    def restore(self, state: bytes) -> None:
        """See `LengthPredictor`."""
        rows = msgspec.msgpack.decode(state, type=list[tuple[str, bytes, float]])
        self._responses.clear()
        self._responses.extend(_Known(name, np.frombuffer(figures, np.float32), log) for name, figures, log in rows)
        self._came += len(self._responses)

    def _fit(self, responses: Sequence[_Known]) -> None:
        from scipy.optimize import isotonic_regression  # takes a second

        figures = np.stack([known.figures for known in responses])
        logs = np.array([known.log for known in responses])
        in_first = np.array([half_of(known.prompt_id) == 0 for known in responses])
        halves, errors = [], []
        for taught, other in ((in_first, ~in_first), (~in_first, in_first)):
            if not taught.any() or not other.any():
                return  # all are to one prompt, or to few
            trees = self._trees(figures[taught], logs[taught])
            scores = trees.predict(figures[other])
            order = np.argsort(scores, kind="stable")
            mapped = isotonic_regression(logs[other][order]).x
            halves.append(_Half(trees, scores[order], mapped))
            errors.append(logs[other][order] - mapped)
        self._halves = halves
        self._deviation = float(np.std(np.concatenate(errors)))

    def _trees(self, figures: Figures, logs: Array) -> Any:
        edges = np.quantile(logs, np.arange(1, _GRADES) / _GRADES)
        grades = np.searchsorted(edges, logs)
        data = self._lightgbm.Dataset(figures, label=grades, group=[len(grades)])
        settings = {
            "objective": "lambdarank",
            "label_gain": list(range(_GRADES)),
            "num_leaves": _LEAVES,
            "min_data_in_leaf": max(2, len(grades) // 50),
            "learning_rate": 0.1,
            "num_threads": 1,
            "deterministic": True,
            "seed": 0,
            "verbosity": -1,
        }
        return self._lightgbm.train(settings, data, num_boost_round=_TREES)


def _mapped(half: _Half, figures: Figures) -> Array:
    """[n] expected log-lengths of n prompts."""
    return np.asarray(np.interp(half.trees.predict(figures), half.scores, half.logs))
