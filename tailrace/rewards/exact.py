"""Rewards a response that equals the answer."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tailrace.rewards.base import Grader, GradingRequest, expected_text, verdict

if TYPE_CHECKING:
    from tailrace.config.rewards import ExactReward


class ExactGrader(Grader):
    """Gives 1 if the response, stripped of white space, equals the answer."""

    def __init__(self, config: "ExactReward") -> None:
        self._ignore_case = config.ignore_case

    def grade(self, request: GradingRequest) -> Mapping[str, float | str]:
        """See `Grader`."""
        response = self._normal(request.response)
        return verdict(response == self._normal(expected_text(request)), response)

    def can_be_right(self, request: GradingRequest) -> bool:
        """Whether the answer is one line. A text of several lines is mostly a worked solution."""
        return "\n" not in expected_text(request)

    def _normal(self, text: str) -> str:
        return text.strip().casefold() if self._ignore_case else text.strip()
