"""Rewards a response in which a pattern finds the answer."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tailrace.config.patterns import can_find, find
from tailrace.rewards.base import Grader, GradingRequest, expected_text, verdict

if TYPE_CHECKING:
    from tailrace.config.rewards import RegexReward


class RegexGrader(Grader):
    """Gives 1 if the first or last match of a pattern equals the answer, both stripped of white space."""

    def __init__(self, config: "RegexReward") -> None:
        self._pattern = re.compile(config.pattern)
        self._which = config.match

    def grade(self, request: GradingRequest) -> Mapping[str, float | str]:
        """See `Grader`."""
        answer = expected_text(request)
        found = find(self._pattern, request.response, self._which)
        return verdict(found is not None and found.strip() == answer, found and found.strip())

    def can_be_right(self, request: GradingRequest) -> bool:
        """Whether the pattern can find the answer in any response."""
        return can_find(self._pattern, expected_text(request))
