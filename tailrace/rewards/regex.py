"""Rewards a response in which a pattern finds the answer."""

import re
from collections import deque
from typing import Literal

from tailrace.config.rewards import RegexReward
from tailrace.rewards.base import Grader, GradingRequest, expected_text


def find(pattern: re.Pattern[str], text: str, which: Literal["first", "last"]) -> str | None:
    """Group 1 of the chosen match, the whole match where `pattern` has no groups, or None without a match."""
    matches = pattern.finditer(text)
    match = next(matches, None) if which == "first" else next(iter(deque(matches, maxlen=1)), None)
    if match is None:
        return None
    return str(match[1] or "") if pattern.groups else str(match[0])


class RegexGrader(Grader):
    """1 where the first or last match of a pattern equals the answer, both stripped of white space."""

    def __init__(self, config: RegexReward) -> None:
        self._pattern = re.compile(config.pattern)
        self._which = config.match

    def grade(self, request: GradingRequest) -> bool:
        found = find(self._pattern, request.response, self._which)
        return found is not None and found.strip() == expected_text(request)
