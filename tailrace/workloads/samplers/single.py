"""Draws responses of one turn."""

from functools import partial

import numpy as np
import polars as pl

from tailrace.types import FinishReason
from tailrace.workloads.marginals.base import Array
from tailrace.workloads.parameters import Parameters, Single
from tailrace.workloads.samplers.base import MOST_TOKENS
from tailrace.workloads.samplers.scores import mixed, score_correlation, score_share, shares_of


class SingleTurns:
    """Draws the responses of a step to prompts of known lengths."""

    def __init__(self, parameters: Parameters, response: Single) -> None:
        """Draw with these parameters."""
        self._response = response
        self._drift = parameters.drift
        self._limit = parameters.provenance.max_new_tokens or MOST_TOKENS
        self._context = parameters.provenance.context or MOST_TOKENS
        correlation = score_correlation(response.rank_correlation)
        share = score_share(partial(self._lengths, factor=1.0), response.tokens.prompt_share)
        self._share = max(share, correlation**2)  # the prompt explains what its length explains
        self._of_length = correlation**2 / self._share if correlation else 0.0
        self._sign = -1.0 if correlation < 0 else 1.0

    def draw(self, random: np.random.Generator, step: int, prompts: Array, scores: Array, size: int) -> pl.DataFrame:
        """Draw the columns of [groups · size] responses.

        Args:
            prompts: [groups] tokens.
            scores: [groups] normal scores of these.
        """
        effects = self._sign * mixed(scores, random.standard_normal(len(scores)), self._of_length)
        own = mixed(np.repeat(effects, size), random.standard_normal(len(scores) * size), self._share)
        wanted = self._lengths(shares_of(own), factor=1.0 if self._drift is None else self._drift.factor(step))
        room = np.minimum(self._limit, self._context - np.repeat(prompts, size))
        reasons = np.where(wanted >= room, FinishReason.LENGTH.value, FinishReason.STOP.value)
        return pl.DataFrame({"response_tokens": np.minimum(wanted, room), "finish_reason": reasons})

    def _lengths(self, shares: Array, *, factor: float) -> Array:
        """Return the tokens at these shares of the distribution, `factor` times as long by the drift.

        Those of capped samples are the limit. All others are below it, so what is drawn is below `limit / factor`.
        """
        tokens, capped = self._response.tokens.distribution, self._response.capped_share
        if capped is None:
            return np.maximum(1, np.rint(tokens.quantile(shares) * factor))
        below = float(tokens.cdf(np.array([(self._limit - 0.5) / factor]))[0])  # of what is rounded to less
        ended = tokens.quantile(np.minimum(shares / (1 - capped), 1) * below) if capped < 1 else shares
        return np.where(shares < 1 - capped, np.maximum(1, np.rint(ended * factor)), self._limit)
