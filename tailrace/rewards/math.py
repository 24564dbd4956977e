"""Rewards a response whose final expression equals the answer mathematically."""

import logging
import re
from typing import Any

from math_verify import parse, verify  # type: ignore[import-untyped]

from tailrace.config.rewards import MathReward
from tailrace.errors import RewardError
from tailrace.rewards.base import Grader, GradingRequest, expected_text

_MARKED = re.compile(r"\$|\\boxed|\\\(|\\\[|\\begin|\*\*")
"""The answer says where its LaTeX is, or is written as Python would (2**10)."""


class MathGrader(Grader):
    r"""math-verify: 1/2 equals 0.5 equals \boxed{\frac{1}{2}}."""

    def __init__(self, config: MathReward) -> None:
        # It warns that its time limits are off; ours is the pool's, which ends loops that no signal handler can.
        logging.getLogger("math_verify").setLevel(logging.ERROR)

    def grade(self, request: GradingRequest) -> bool:
        answer = expected_text(request)
        # A bare answer is read as LaTeX: as plain text, "2x+1" would be taken for the number 2.
        gold = _parse(answer if _MARKED.search(answer) else f"${answer}$")
        if not gold:
            raise RewardError(f"the answer {answer!r} is not a mathematical expression")
        return bool(verify(gold, _parse(request.response), timeout_seconds=None))


def _parse(text: str) -> list[Any]:
    return list(parse(text, parsing_timeout=None))
