"""Lengths by learning to rank: boosted trees on the figures of `features`, fitted to the order of lengths (LambdaMART).

Burges 2010, "From RankNet to LambdaRank to LambdaMART: An Overview". The trees tell an order and no lengths. So the
prompts are in two halves. Each half has trees of its own, and an increasing function from the scores that these give
the other half to its log-lengths. A prompt is expected to have the mean of what the two halves give.

LightGBM is an extra: pip install "tailrace[lightgbm]".
"""

import math
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tailrace.errors import ConfigError
from tailrace.planning.lengths.base import UNKNOWN, Asked, Expectation, Finished
from tailrace.planning.lengths.features import text_figures
from tailrace.planning.lengths.regression import Figures, newest
from tailrace.planning.lengths.ridge import Array

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


class Lambdarank:
    """See the module. It finds figures and fits trees in `prepare`."""

    name = "lambdarank"
    scouts = False
    tells_samples_apart = False

    def __init__(self, *, words: int = 256, most: int = 4096) -> None:
        """`words`: see `Features`. `most`: responses that it learns from, the newest ones.

        Raises:
            ConfigError: LightGBM is not there.
        """
        try:
            import lightgbm
        except (ImportError, OSError) as error:  # the latter where the system lacks OpenMP
            raise ConfigError(
                f'rollout.lengths.type lambdarank needs LightGBM ({error}); pip install "tailrace[lightgbm]"'
            ) from None
        self._lightgbm = lightgbm
        self._words = words
        self._responses: deque[_Known] = deque(maxlen=most)
        self._figures: dict[str, Figures] = {}
        """By prompt."""
        self._new = 0
        """Responses since the last fit."""
        self._halves: list[_Half] = []
        self._deviation = UNKNOWN[1]
        self.knowledge = f"the newest responses, by {words} words"

    def prepare(self, prompts: Sequence[Asked]) -> None:
        """See `LengthPredictor`."""
        new = {prompt.prompt_id: prompt for prompt in prompts if prompt.prompt_id not in self._figures}
        if new:
            found = ((name, text_figures(prompt, self._words)) for name, prompt in new.items())
            self._figures = newest(self._figures, found)
        responses, came = list(self._responses), self._new
        if len(responses) >= _LEAST and came >= _NEW_SHARE * len(responses):
            self._fit(responses)
            self._new -= came

    def knows(self, prompt: Asked) -> bool:
        """See `LengthPredictor`."""
        return bool(self._halves)

    def expect(self, prompts: Sequence[Asked]) -> list[Expectation]:
        """See `LengthPredictor`. A prompt that was not prepared is expected to be like all others."""
        halves = self._halves
        if not halves:
            return [Expectation.of(*UNKNOWN)] * len(prompts)
        typical = float(np.mean([half.logs.mean() for half in halves]))
        known = [(place, self._figures.get(prompt.prompt_id)) for place, prompt in enumerate(prompts)]
        places = [place for place, figures in known if figures is not None]
        means = np.full(len(prompts), typical)
        if places:
            rows = np.stack([figures for _, figures in known if figures is not None])
            means[places] = np.mean([_mapped(half, rows) for half in halves], axis=0)
        return [Expectation.of(float(mean), self._deviation) for mean in means]

    def suppose(self, prompt: Asked, tokens: float) -> Expectation:
        """See `LengthPredictor`. It knows prompts by their figures alone, so one more response changes nothing."""
        return self.expect([prompt])[0]

    def learn(self, finished: Sequence[Finished]) -> None:
        """See `LengthPredictor`."""
        for response in finished:
            figures = self._figures.get(response.asked.prompt_id)
            if figures is not None:
                self._responses.append(_Known(response.asked.prompt_id, figures, math.log(response.tokens)))
                self._new += 1

    def state(self) -> bytes:
        """See `LengthPredictor`: the responses, from which all is fitted again."""
        rows = [(known.prompt_id, known.figures.tobytes(), known.log) for known in self._responses]
        return msgspec.msgpack.encode(rows)

    def restore(self, state: bytes) -> None:
        """See `LengthPredictor`."""
        rows = msgspec.msgpack.decode(state, type=list[tuple[str, bytes, float]])
        self._responses.clear()
        self._responses.extend(_Known(name, np.frombuffer(figures, np.float32), log) for name, figures, log in rows)
        self._new = len(self._responses)

    def _fit(self, responses: Sequence[_Known]) -> None:
        from scipy.optimize import isotonic_regression  # takes a second

        figures = np.stack([known.figures for known in responses])
        logs = np.array([known.log for known in responses])
        in_first = np.array([zlib.crc32(known.prompt_id.encode()) % 2 == 0 for known in responses])
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
