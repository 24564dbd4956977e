"""A mean of all log-lengths, and how far each prompt is from it: a model with one random effect.

A log-length is μ + u + e. u is normal with the variance τ² over prompts, and e with σ² over the responses of a prompt.
With n responses of the mean ȳ, the best linear prediction of a prompt is μ + n τ² / (n τ² + σ²) (ȳ - μ) (Henderson
1975, "Best linear unbiased estimation and prediction under a selection model"). So a prompt with few responses is
taken to be much like the others, and more so the less prompts differ. The variances are those of an analysis of
variance with unequal groups (Searle, Casella and McCulloch 1992, "Variance Components", section 3.6).

Responses of older weights count less: each version multiplies their weight by `discount`.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import msgspec

from tailrace.types import WeightVersion

FIRST_SHARE = 0.1
"""τ² / (τ² + σ²) while no prompt has two responses. Public traces have 0.06 to 0.9 (docs/workloads.md). In the order of
prompts by their one response any share above 0 gives the same.
"""
LEAST_SHARE = 0.02
"""The estimate may be 0 or below by chance, and would then tell no prompts apart."""


class Normal(NamedTuple):
    """What is expected of a log-length."""

    mean: float
    deviation: float


@dataclass(slots=True)
class _Sums:
    """The weighted number, sum, and sum of squares of some log-lengths, as of a version."""

    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0
    version: WeightVersion = 0

    def age(self, version: WeightVersion, discount: float) -> None:
        """Give all so far the weight that they have at a version; an older one changes nothing."""
        if version > self.version:
            factor = discount ** (version - self.version)
            self.count, self.total, self.squares = self.count * factor, self.total * factor, self.squares * factor
            self.version = version

    def add(self, value: float, weight: float) -> None:
        self.count += weight
        self.total += weight * value
        self.squares += weight * value * value

    @property
    def spread(self) -> float:
        """The sum of squared distances from their mean."""
        return max(0.0, self.squares - self.total**2 / self.count) if self.count > 0 else 0.0


class _Variances(NamedTuple):
    mean: float
    between: float
    """τ²"""
    within: float
    """σ²"""


class EffectsState(msgspec.Struct, frozen=True, kw_only=True):
    """What `Effects` have learned."""

    prompts: dict[str, _Sums]
    version: WeightVersion


class Effects:
    """The log-lengths of the responses to many prompts."""

    def __init__(self, *, discount: float = 1.0) -> None:
        """`discount`: the weight that a response keeps with each newer version: above 0, and at most 1.

        Raises:
            ValueError: it is none.
        """
        if not 0 < discount <= 1:
            raise ValueError(f"discount is {discount:g}; give a number above 0, and at most 1")
        self._discount = discount
        self._prompts: dict[str, _Sums] = {}
        self._version: WeightVersion = 0

    def knows(self, prompt_id: str) -> bool:
        """Whether there is a response to this prompt."""
        return prompt_id in self._prompts

    def add(self, prompt_id: str, value: float, version: WeightVersion) -> None:
        """Take in the log-length of a response that this version has begun."""
        sums = self._prompts.setdefault(prompt_id, _Sums(version=version))
        sums.age(version, self._discount)
        sums.add(value, self._discount ** (sums.version - version))
        self._version = max(self._version, version)
        self.__dict__.pop("_variances", None)

    def state(self) -> EffectsState:
        """Return what they have learned."""
        return EffectsState(prompts=self._prompts, version=self._version)

    def restore(self, state: EffectsState) -> None:
        """Go on from what others have learned."""
        self._prompts, self._version = dict(state.prompts), state.version
        self.__dict__.pop("_variances", None)

    def expect(self, prompt_id: str, *, beside: float | None = None) -> Normal | None:
        """Return what is expected of a response to a prompt; None where nothing is known at all.

        Args:
            beside: a log-length that is taken for that of one more response to it.
        """
        if not self._prompts:
            return None
        mean, between, within = self._variances
        sums = self._prompts.get(prompt_id, _Sums())
        count, total = sums.count, sums.total
        if beside is not None:
            count, total = count + 1, total + beside
        if count * between <= 0:
            return Normal(mean, math.sqrt(between + within))
        share = count * between / (count * between + within)
        return Normal(mean + share * (total / count - mean), math.sqrt(within + between * (1 - share)))

    @property
    def prompt_share(self) -> float:
        """τ² / (τ² + σ²), the part of the variance that the prompt explains; 0 where nothing varies."""
        _, between, within = self._variances
        return between / (between + within) if between + within > 0 else 0.0

    @cached_property
    def _variances(self) -> _Variances:
        for sums in self._prompts.values():
            sums.age(self._version, self._discount)
        known = [sums for sums in self._prompts.values() if sums.count > 0]
        count = sum(sums.count for sums in known)
        mean = sum(sums.total for sums in known) / count
        inner, outer = sum(sums.spread for sums in known), sum(s.count * (s.total / s.count - mean) ** 2 for s in known)
        freedom = count - len(known)
        if freedom < 1:  # one response a prompt: all that varies may be either
            both = (inner + outer) / count
            return _Variances(mean, FIRST_SHARE * both, (1 - FIRST_SHARE) * both)
        within = inner / freedom
        size = count - sum(sums.count**2 for sums in known) / count
        between = (outer - (len(known) - 1) * within) / size if size > 0 else 0.0
        return _Variances(mean, max(between, LEAST_SHARE / (1 - LEAST_SHARE) * within), within)
