"""Rewards a response by its integer: whole for the right one, in part for its sign and digits."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tailrace.config.patterns import find
from tailrace.errors import RewardError, quoted
from tailrace.rewards.base import REWARD, Grader, GradingRequest, expected_text, verdict

if TYPE_CHECKING:
    from tailrace.config.rewards import IntegerReward

_INTEGER = re.compile(r"-?[0-9]+")
_MINUS = str.maketrans(dict.fromkeys("\u2212\ufe63\uff0d", "-"))


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
        found = find(_INTEGER, request.response.translate(_MINUS), self._which)
        if found is None:
            return verdict(False, None)
        ours, wanted = _sign_and_digits(found), _sign_and_digits(answer)
        reward = 1.0 if ours == wanted else self._partial * _share(ours, wanted)
        final = f"-{ours[1]}" if ours[0] else ours[1]  # as one text for each integer, since equal ones vote together
        return {**verdict(ours == wanted, final), REWARD: reward}

    def can_be_right(self, request: GradingRequest) -> bool:
        """Whether the answer is an integer."""
        return _INTEGER.fullmatch(expected_text(request)) is not None


def _sign_and_digits(integer: str) -> tuple[bool, str]:
    """Whether it is negative, and its digits; as a text, since Python reads no integers of thousands of digits."""
    digits = integer.removeprefix("-").lstrip("0") or "0"
    return integer.startswith("-") and digits != "0", digits


def _share(found: tuple[bool, str], answer: tuple[bool, str]) -> float:
    """The share of places that are right."""
    (sign, digits), (wanted_sign, wanted) = found, answer
    same = sum(ours == theirs for ours, theirs in zip(digits[::-1], wanted[::-1], strict=False))
    return (same + (sign == wanted_sign)) / (1 + max(len(digits), len(wanted)))
