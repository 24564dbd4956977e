"""Decides how many engines generate, while a run goes on.

Source: StreamRL, section 4.2 (Dynamic adjustment). With δ the seconds by which generating a step takes longer than
training on it, and δ' those that one more engine would save, an engine is added when δ >= δ'. So generation stays the
longer of the two after that. The paper never releases one. Here one is released when generation would be the shorter
of the two without it, too, by a margin. Both rules cannot follow each other while nothing else changes.

A change needs several steps that ask for it in a row, and is followed by steps without another one. Its effect is not
in the times before.
"""

from collections import deque
from typing import Literal

import msgspec

Action = Literal["add", "release", "hold"]


class ScaleLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an elastic pool may do.

    Raises:
        ValueError: `least` is above `most`, or a number is below its least.
    """

    least: int
    """Engines: 1 or more."""
    most: int
    patience: int = 2
    """Steps in a row that ask for a change before it is made: 1 or more."""
    cool_down: int = 2
    """Steps after a change in which none is asked for: 0 or more."""
    margin: float = 0.1
    """The part of the training time by which generation has to be shorter without an engine that is released."""
    most_changes: int = 4
    """Changes within `window` steps; a pool that wavers stops there."""
    window: int = 20

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name, least in (("least", 1), ("patience", 1), ("cool_down", 0), ("most_changes", 1), ("window", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; give {least} or more")
        if self.least > self.most:
            raise ValueError(f"least is {self.least}, and most is {self.most}; give a least that is not above it")
        if self.margin < 0:
            raise ValueError(f"margin is {self.margin:g}; give 0 or more")


class ScaleDecision(msgspec.Struct, frozen=True, kw_only=True):
    """A decision with all of its terms."""

    action: Action
    why: str
    """In words."""
    engines: int
    """Before it."""
    generation_s: float
    training_s: float
    lead_s: float
    """δ: generation less training."""
    saved_s: float
    """δ': by which one more engine is predicted to shorten generation."""
    lost_s: float
    """By which one engine less is predicted to lengthen it."""


class Elasticity:
    """The decisions of a run. It remembers the steps before."""

    def __init__(self, limits: ScaleLimits) -> None:
        self._limits = limits
        self._asked: Action = "hold"
        self._in_a_row = 0
        self._since_change = limits.cool_down
        self._changes: deque[int] = deque()
        """The steps of the newest changes."""
        self._step = 0

    def bound(self, most: int) -> None:
        """Add no engines beyond so many from now on: there is no room for more."""
        self._limits = msgspec.structs.replace(self._limits, most=max(self._limits.least, most))

    def decide(
        self, *, engines: int, generation_s: float, training_s: float, saved_s: float, lost_s: float
    ) -> ScaleDecision:
        """Decide after a training step.

        Args:
            engines: that generated it.
            generation_s: seconds in which they generated its samples, from the first to the last.
            training_s: seconds in which it was trained on.
            saved_s: see `ScaleDecision`.
            lost_s: see there.
        """
        lead_s = generation_s - training_s
        wanted, why = self._wanted(engines, lead_s, training_s, saved_s, lost_s)
        self._in_a_row = self._in_a_row + 1 if wanted == self._asked else 1
        self._asked = wanted
        action, why = self._allowed(wanted, why)
        self._since_change += 1
        if action != "hold":
            self._since_change = self._in_a_row = 0
            self._changes.append(self._step)
        self._step += 1
        return ScaleDecision(
            action=action,
            why=why,
            engines=engines,
            generation_s=generation_s,
            training_s=training_s,
            lead_s=lead_s,
            saved_s=saved_s,
            lost_s=lost_s,
        )

    def _wanted(
        self, engines: int, lead_s: float, training_s: float, saved_s: float, lost_s: float
    ) -> tuple[Action, str]:
        limits = self._limits
        if 0 < saved_s <= lead_s:
            if engines >= limits.most:
                return "hold", f"one more would pay, and there are {engines} already"
            return "add", "generation is the longer one, by more than one more engine saves"
        if lead_s + lost_s <= -limits.margin * training_s:
            if engines <= limits.least:
                return "hold", f"one less would do, and there are only {engines}"
            return "release", "generation would be the shorter one with an engine less, too"
        return "hold", "both take about equally long"

    def _allowed(self, wanted: Action, why: str) -> tuple[Action, str]:
        """`wanted`, or the reason why not now."""
        limits = self._limits
        if wanted == "hold":
            return "hold", why
        if self._since_change < limits.cool_down:
            return "hold", f"{why}; the last change was {self._since_change + 1} of {limits.cool_down} steps ago"
        if self._in_a_row < limits.patience:
            return "hold", f"{why}; for {self._in_a_row} of {limits.patience} steps"
        while self._changes and self._changes[0] <= self._step - limits.window:
            self._changes.popleft()
        if len(self._changes) >= limits.most_changes:
            return "hold", f"{why}; there were {limits.most_changes} changes within {limits.window} steps"
        return wanted, why
