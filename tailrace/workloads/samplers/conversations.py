"""Draws conversations: turns that read a growing context, with tools between them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from tailrace.types import FinishReason
from tailrace.workloads.marginals.base import Array
from tailrace.workloads.parameters import Amount, Parameters, Tool, Turns
from tailrace.workloads.parts import as_lists
from tailrace.workloads.samplers.base import MOST_TOKENS
from tailrace.workloads.samplers.scores import mixed, score_correlation, score_share, shares_of
from tailrace.workloads.trace import TOOL_CALL, TURN

_Mask = npt.NDArray[np.bool_]


class Conversations:
    """Draws the conversations of a step to prompts of known lengths. Arrays are [samples, turns]."""

    def __init__(self, parameters: Parameters, response: Turns) -> None:
        """Draw with these parameters."""
        self._response = response
        self._limit = parameters.provenance.max_new_tokens or MOST_TOKENS
        self._context = parameters.provenance.context or MOST_TOKENS
        self._count = _Drawn(response.count)
        self._calling = _of_numbers(response.calling, response.most)
        self._final = _of_numbers(response.final, response.most)
        self._alike = score_correlation(response.turn_correlation)

    def draw(self, random: np.random.Generator, step: int, prompts: Array, scores: Array, size: int) -> pl.DataFrame:
        """Draw the columns of [groups · size] conversations.

        Args:
            step: has no influence, nor have `scores`.
            prompts: [groups] tokens.
        """
        samples = len(prompts) * size
        counts = self._count.at(_of_prompts(random, samples, size), random.standard_normal(samples)).astype(int)
        wanted = self._wanted(random, counts, size)
        returned = self._returned(random, wanted.shape)
        before = np.cumsum(wanted, axis=1) - wanted
        grown = returned + self._response.template_tokens
        reads = np.repeat(prompts, size)[:, None] + before + np.cumsum(grown, axis=1) - grown
        room = np.minimum(self._context - reads, self._limit - before)
        happens, is_cut = _ends(counts, wanted, room)
        generated = np.minimum(wanted, room)
        return pl.DataFrame(
            {
                "response_tokens": np.where(happens, generated, 0).sum(axis=1),
                "finish_reason": np.where(is_cut, FinishReason.LENGTH.value, FinishReason.STOP.value),
                "turns": self._turns(happens, reads, generated),
                "tool_calls": _calls(random, self._response.tool, happens[:, 1:], returned[:, :-1]),
            }
        )

    def _wanted(self, random: np.random.Generator, counts: npt.NDArray[Any], size: int) -> Array:
        """Draw the tokens of turns, without limits. A prompt has one effect on calling turns, another on last ones."""
        samples, shared = len(counts), random.standard_normal(len(counts))

        def turns(amounts: Sequence[_Drawn]) -> Array:
            effects = _of_prompts(random, samples, size)
            scores = random.standard_normal((len(amounts), samples))
            own = mixed(shared, scores, self._alike)
            return np.stack([amount.at(effects, score) for amount, score in zip(amounts, own, strict=True)], axis=1)

        wanted, final = turns(self._calling), turns(self._final)
        ends = (np.arange(samples), counts - 1)
        wanted[ends] = final[ends]
        return np.maximum(1, np.rint(wanted))

    def _returned(self, random: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """Draw the tokens that the tools return after each turn."""
        drawn = self._response.tool.returned_tokens.quantile(random.random(shape).ravel())
        return np.maximum(0, np.rint(drawn)).reshape(shape)

    def _turns(self, happens: _Mask, reads: Array, generated: Array) -> pl.Series:
        first, later = self._response.first_cached_share, self._response.later_cached_share
        cached = np.full(happens.shape, np.nan)
        cached[:, 0] = np.nan if first is None else np.floor(first * reads[:, 0])
        cached[:, 1:] = np.nan if later is None else np.floor(later * (reads + generated)[:, :-1])
        columns = {
            "prompt_tokens": reads[happens],
            "cached_tokens": pl.Series(cached[happens]).fill_nan(None),
            "generated_tokens": generated[happens],
        }
        return as_lists(columns, TURN, happens.sum(axis=1).tolist())


class _Drawn:
    """An amount at given scores."""

    def __init__(self, amount: Amount) -> None:
        self._distribution = amount.distribution
        self._share = score_share(amount.distribution.quantile, amount.prompt_share)

    def at(self, effects: Array, own: Array) -> Array:
        """Return the amount of samples with these normal numbers, of their prompts and their own."""
        return self._distribution.quantile(shares_of(mixed(effects, own, self._share)))


def _of_prompts(random: np.random.Generator, samples: int, size: int) -> Array:
    """Draw a normal number for each prompt, and repeat it for its samples."""
    return np.repeat(random.standard_normal(samples // size), size)


def _of_numbers(amounts: Sequence[Amount], most: int) -> list[_Drawn]:
    """Return the amounts of the numbers up to `most`, of which the later ones are as the last that is given."""
    drawn = [_Drawn(amount) for amount in amounts]
    return [drawn[min(number, len(drawn) - 1)] for number in range(most)]


def _ends(counts: npt.NDArray[Any], wanted: Array, room: Array) -> tuple[_Mask, _Mask]:
    """Return which turns happen, and which samples a limit has cut: in a turn without the room that it wants."""
    planned = np.arange(wanted.shape[1]) < counts[:, None]
    is_full = planned & (wanted >= room)
    full_before = np.cumsum(is_full, axis=1) > is_full
    return planned & ~full_before & (room >= 1), np.any(is_full, axis=1)


def _calls(random: np.random.Generator, tool: Tool, called: _Mask, returned: Array) -> pl.Series:
    count = int(called.sum())
    chance, of_hits = random.random((2, count))
    seconds = None if tool.seconds is None else tool.seconds.quantile(random.random(count))
    is_hit = None if tool.hit_share is None else chance < tool.hit_share
    if seconds is not None and is_hit is not None and tool.hit_seconds is not None:
        seconds = np.where(is_hit, tool.hit_seconds.quantile(of_hits), seconds)
    columns = {
        "turn": np.nonzero(called)[1],
        "name": tool.name,
        "seconds": seconds,
        "returned_tokens": returned[called],
        "cached": is_hit,
    }
    return as_lists(columns, TOOL_CALL, called.sum(axis=1).tolist())
