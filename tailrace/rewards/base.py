"""The interface of reward functions."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tailrace.errors import RewardError

if TYPE_CHECKING:  # a grading process starts without NumPy
    from tailrace.types import Prompt, Sample

REWARD = "reward"
"""The name of the reward in a grader's mapping."""
CORRECT = "correct"
"""The name of the part that says whether the response is right."""
FINAL_ANSWER = "final_answer"
"""The name of the response's answer in a grader's mapping; see `Grade.final_answer`."""


class GradingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A response to score. Everything in it can be written as JSON."""

    prompt: str
    """The text that the model has read, after the chat template."""
    question: str | list[dict[str, Any]]
    """The problem in the source: plain text, or chat messages."""
    response: str
    answer: Any
    metadata: Mapping[str, Any]
    tokens: list[int]
    """The tokens of the response."""
    finish_reason: str
    """`stop`, `length` or `abort`; see `FinishReason`."""

    @classmethod
    def of(cls, prompt: "Prompt", sample: "Sample", response: str) -> "GradingRequest":
        """That of a sample. `response`: its text."""
        return cls(
            prompt=prompt.text,
            question=prompt.question,
            response=response,
            answer=prompt.answer,
            metadata=prompt.metadata,
            tokens=sample.response_ids.tolist(),
            finish_reason=sample.finish_reason.value,
        )


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    """A score, or the reason why there is none."""

    reward: float | None
    parts: Mapping[str, float] = {}
    """Further figures of the grader, by name. `correct` among them is 1 or 0: whether the response is right."""
    final_answer: str | None = None
    """The answer that the response gives in the end, as the grader reads it: equal ones vote together. Empty where it
    gives none, and None where the grader does not say."""
    error: str | None = None
    """One line, its kind first: `timeout: …`, `died: …`, or `ErrorName: message` of the grader. The kind of a reward by
    name has that name before it: `judge.timeout: …`. A sum of rewards has a line for each grading that failed."""
    spent: Mapping[str, float] = {}
    """What the grading took, by name: requests, tokens, cost. Of responses that are graded together, the first has it;
    behind the name of a reward it is `judge.cost`."""
    traceback: str | None = None
    """The traceback of an error that the grader raised: the lines of the user's own files, of bounded length."""

    @property
    def correct(self) -> bool | None:
        """Whether the response is right; None if the grader does not say."""
        return bool(self.parts[CORRECT]) if CORRECT in self.parts else None


Result = float | bool | Mapping[str, float | str]
"""A reward. A truth value also says whether the response is right. A mapping has the reward as `reward`, and maybe a
text `final_answer`; its other entries are parts."""


class Grader(ABC):
    """Scores responses. A grader runs inside a worker process, and may raise anything."""

    @abstractmethod
    def grade(self, request: GradingRequest) -> Result:
        """The reward of `request.response`, a finite number."""

    def grade_all(self, requests: Sequence[GradingRequest]) -> Sequence[Result | Exception]:
        """The rewards of responses that are graded together, in their order: those of a group, or of a batch.

        An error in place of a reward is the failure of that grading alone.
        """
        return [self.grade(request) for request in requests]

    def can_be_right(self, request: GradingRequest) -> bool:
        """Whether this grader can find any response to the prompt right; `request.response` is the answer itself.

        It may raise the errors of `grade`, which also mean no. A grader that cannot tell returns True.
        """
        return True


class AsyncGrader(ABC):
    """Scores responses, several at a time."""

    concurrency: int
    """The number of concurrent gradings."""

    @abstractmethod
    async def grade(self, request: GradingRequest) -> Result:
        """See `Grader.grade`."""

    async def grade_all(self, requests: Sequence[GradingRequest]) -> Sequence[Result]:
        """See `Grader.grade_all`."""
        return [await self.grade(request) for request in requests]

    async def close(self) -> None:  # noqa: B027  (most have nothing open)
        """Close what is open; no grading is under way."""


def verdict(right: bool, final_answer: str | None) -> dict[str, float | str]:
    """The result of a grader whose reward is 1 or 0. `final_answer`: that of the response, if it gives one."""
    return {REWARD: float(right), CORRECT: right, FINAL_ANSWER: final_answer or ""}


def expected_text(request: GradingRequest) -> str:
    """The answer as stripped text. A number in the source counts as its text.

    Raises:
        RewardError: the prompt has no answer, or an empty one, which an empty response would equal.
    """
    answer = "" if request.answer is None else str(request.answer).strip()
    if not answer:
        what = "no answer" if request.answer is None else f"the empty answer {request.answer!r}"
        raise RewardError(f"the prompt has {what} to compare with; set answer_column of prompts.source")
    return answer


def question_text(request: GradingRequest) -> str:
    """The question as one text: of a conversation, each message behind its role."""
    if isinstance(request.question, str):
        return request.question
    return "\n\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in request.question)


def failure_kind(error: str) -> str:
    """The kind of a `Grade.error`: timeout, died, or the name of the grader's exception."""
    return error.partition(":")[0].partition(" (")[0]


class FailureReport:
    """Reports failed gradings in events."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        """The kinds whose traceback has been in an event."""

    def info(self, grades: Iterable[Grade]) -> dict[str, Any]:
        """The report for one event: `failures`, the count of each kind; `errors`, a line each; `tracebacks`, by kind.

        Only the first traceback of each kind is reported. The report is empty if no grading failed.
        """
        failed = [grade for grade in grades if grade.error]
        if not failed:
            return {}
        errors = [line for grade in failed for line in (grade.error or "").splitlines()]
        return {
            "failures": dict(Counter(map(failure_kind, errors))),
            "errors": errors,
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
