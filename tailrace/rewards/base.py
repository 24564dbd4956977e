"""The seam of reward functions."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import msgspec

from tailrace.errors import RewardError


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
    """One line, its kind first: `timeout: …`, `died: …`, or `ErrorName: message` of the grader."""


class Grader(ABC):
    """Scores one response. Runs inside a worker process; may raise anything."""

    @abstractmethod
    def grade(self, request: GradingRequest) -> float:
        """The reward of `request.response`, a finite number."""


def expected_text(request: GradingRequest) -> str:
    """The answer as stripped text; a number in the source counts as its text.

    Raises:
        RewardError: the prompt came without an answer.
    """
    if request.answer is None:
        raise RewardError("the prompt has no answer to compare with; set answer_column of prompts.source")
    return str(request.answer).strip()


def failure_kind(error: str) -> str:
    """The kind of a `Grade.error`: timeout, died, or the name of the grader's exception."""
    return error.partition(":")[0]
