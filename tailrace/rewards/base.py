"""The seam of reward functions."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from tailrace.errors import RewardError

CORRECT = "correct"
"""The part that says whether the response is right."""


class GradingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A response to score. Everything in it can be written as JSON."""

    prompt: str
    """What the model has read: after the chat template."""
    question: str | list[dict[str, Any]]
    """What the source has: plain text, or chat messages."""
    response: str
    answer: Any
    metadata: Mapping[str, Any]
    tokens: list[int]
    """Of the response."""
    finish_reason: str
    """`stop`, `length` or `abort`, see `FinishReason`."""


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    """A score, or the reason why there is none."""

    reward: float | None
    parts: Mapping[str, float] = {}
    """Figures by name that the grader gave beside it. `correct` among them is 1 or 0: whether the response is right."""
    error: str | None = None
    """One line, its kind first: `timeout: …`, `died: …`, or `ErrorName: message` of the grader."""
    traceback: str | None = None
    """Of that error, where the grader raised it: the lines of the user's own files, of bounded length."""

    @property
    def correct(self) -> bool | None:
        """Whether the response is right; None where the grader does not say."""
        return bool(self.parts[CORRECT]) if CORRECT in self.parts else None


class Grader(ABC):
    """Scores one response. Runs inside a worker process; may raise anything."""

    @abstractmethod
    def grade(self, request: GradingRequest) -> float | bool | Mapping[str, float]:
        """The reward of `request.response`, a finite number.

        A truth value also says whether the response is right. A mapping has the reward as `reward`; what else it has
        are parts.
        """

    def can_be_right(self, request: GradingRequest) -> bool:
        """Whether this grader can find any response to the prompt right; `request.response` is the answer itself.

        May raise what `grade` does, which says no, too. A grader that cannot tell says that it can.
        """
        return True


class AsyncGrader(ABC):
    """Scores responses, several at a time."""

    concurrency: int
    """Gradings at a time."""

    @abstractmethod
    async def grade(self, request: GradingRequest) -> float | bool | Mapping[str, float]:
        """See `Grader.grade`."""


def expected_text(request: GradingRequest) -> str:
    """The answer as stripped text; a number in the source counts as its text.

    Raises:
        RewardError: the prompt came without an answer, or with an empty one, which an empty response would equal.
    """
    answer = "" if request.answer is None else str(request.answer).strip()
    if not answer:
        what = "no answer" if request.answer is None else f"the empty answer {request.answer!r}"
        raise RewardError(f"the prompt has {what} to compare with; set answer_column of prompts.source")
    return answer


def failure_kind(error: str) -> str:
    """The kind of a `Grade.error`: timeout, died, or the name of the grader's exception."""
    return error.partition(":")[0].partition(" (")[0]


class FailureReport:
    """What the event of some gradings says of those that failed."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        """Kinds whose traceback has been in an event."""

    def info(self, grades: Iterable[Grade]) -> dict[str, Any]:
        """`failures`, how many there are of each kind; `errors`, a line each; `tracebacks`, the first of each kind.

        Empty where none failed.
        """
        failed = [grade for grade in grades if grade.error]
        if not failed:
            return {}
        return {
            "failures": dict(Counter(failure_kind(grade.error or "") for grade in failed)),
            "errors": [grade.error for grade in failed],
            **self._tracebacks(failed),
        }

    def _tracebacks(self, failed: Iterable[Grade]) -> dict[str, Any]:
        new = {}
        for grade in failed:
            kind = failure_kind(grade.error or "")
            if grade.traceback and kind not in self._told:
                self._told.add(kind)
                new[kind] = grade.traceback
        return {"tracebacks": new} if new else {}
