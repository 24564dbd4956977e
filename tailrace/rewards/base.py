"""The seam of reward functions."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import msgspec


class GradingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A response to score. Everything in it can be written as JSON."""

    prompt: str
    response: str
    answer: Any
    metadata: Mapping[str, Any]


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    """A score, or the reason why there is none."""

    reward: float | None
    error: str | None = None
    """One of timeout, died, or `ErrorName: message` of the grader."""


class Grader(ABC):
    """Scores one response. Runs inside a worker process; may raise anything."""

    @abstractmethod
    def grade(self, request: GradingRequest) -> float:
        """The reward of `request.response`, a finite number."""
