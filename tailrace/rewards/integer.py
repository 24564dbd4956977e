"""Rewards a response by its integer: whole for the right one, in part for its sign and digits."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tailrace.config.patterns import find
from tailrace.errors import RewardError, quoted
from tailrace.rewards.base import REWARD, Grader, GradingRequest, expected_text, verdict

if TYPE_CHECKING:
    from tailrace.config.rewards import IntegerReward

_INTEGER = re.compile(r"-?\d+")


class IntegerGrader(Grader):
    """Gives 1 if the first or last integer of the response equals the answer, and less by the share that is right.

    The sign and each digit are a place; digits are compared from the last one on. An integer with other digits than the
    answer has as many places as the longer of both.
    """

    def __init__(self, config: "IntegerReward") -> None:
        self._partial = config.partial
        self._which = config.match

    def grade(self, request: GradingRequest) -> Mapping[str, float | str]:
        """See `Grader`.

        Raises:
            RewardError: the answer is no integer.
        """
        answer = expected_text(request)
        if not _INTEGER.fullmatch(answer):
            raise RewardError(f"the answer {quoted(answer)} is no integer; take another grader, such as math")
        found = find(_INTEGER, request.response, self._which)
        if found is None:
            return verdict(False, None)
        right = int(found) == int(answer)
        reward = 1.0 if right else self._partial * _share(int(found), int(answer))
        return {**verdict(right, found), REWARD: reward}

    def can_be_right(self, request: GradingRequest) -> bool:
        """Whether the answer is an integer."""
        return _INTEGER.fullmatch(expected_text(request)) is not None


def _share(found: int, answer: int) -> float:
    """The share of places that are right."""
    digits, wanted = str(abs(found))[::-1], str(abs(answer))[::-1]
    same = sum(ours == theirs for ours, theirs in zip(digits, wanted, strict=False))
    return (same + ((found < 0) == (answer < 0))) / (1 + max(len(digits), len(wanted)))
