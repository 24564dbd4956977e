r"""Rewards a response whose final expression equals the answer mathematically.

The answer is read as LaTeX, as math-verify reads the content of \boxed{…}: it may hold dollar signs, line breaks and
environments, which break out of $…$. An answer with mathematics inside it, such as `$2$ or $3$`, and an answer that is
a sentence are read like a response.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from math_verify import LatexExtractionConfig, parse, verify  # type: ignore[import-untyped]
from sympy import Basic, Float, Rational  # type: ignore[import-untyped]

from tailrace.config.patterns import find
from tailrace.errors import RewardError
from tailrace.rewards.base import Grader, GradingRequest, expected_text, verdict

if TYPE_CHECKING:
    from tailrace.config.rewards import MathReward

_MATH_INSIDE = re.compile(
    r"\\boxed|\\fbox|(?<!\\)\\\(|(?<!\\)\\\["
    r"|(?<!\\)\$(?=\S)[^$]*(?<=[^\s\\])\$(?!\d)"  # a pair by the rules of Pandoc: two prices are no pair
    r"|(?<!\\)\$\$[^$]+\$\$|\*\*"
)
_SENTENCE = re.compile(r"[^\\]*\b[A-Za-z]{2,}\s+[A-Za-z]{2,}\s+[A-Za-z]{2,}\b[^\\]*")
_MINUS = str.maketrans(dict.fromkeys("\u2212\u2013\u2010\u2011\ufe63\uff0d", "-"))
_TAG = re.compile(r"</?[A-Za-z][\w-]+\s*/?>|</[A-Za-z]\s*>|<[A-Za-z]\s*/>")
_LETTER_TAG = re.compile(r"<([A-Za-z])>")
_LETTER_END = re.compile(r"</([A-Za-z])\s*>")
_MIXED = re.compile(
    r"(?<![\w./^}])(?P<whole>\d{1,3}(?:,\d{3}){1,3}|\d{1,9})"
    r"(?: (?P<over>\d{1,9})/(?P<under>\d{1,9})(?![\d/{]|\.\d)"
    r"| ?\\[dt]?frac(?:\{(?P<frac_over>\d{1,9})\}\{(?P<frac_under>\d{1,9})\}|(?P<digit_over>\d)(?P<digit_under>\d)))"
)
_AMONG_WORDS = re.compile(r"\d\s+\(?[A-Za-z]{3}|\d[A-Za-z]{4}|(?<!\\)\b[A-Za-z]{3,}:?\s+\d")
"""A number beside a word in the normalized text of an answer: math-verify makes each letter of it a variable."""
_EXPONENT = re.compile(r"(?<![\w.])\d{1,30}(?:\.\d{1,30})?[eE][+-]?\d{1,2}(?![\w.]*\w)")


class MathGrader(Grader):
    r"""Compares by math-verify: 1/2 equals 0.5 equals \boxed{\frac{1}{2}}."""

    def __init__(self, config: "MathReward") -> None:
        self._pattern = re.compile(config.pattern) if config.pattern is not None else None
        self._which = config.match
        # math-verify warns that its time limits are off. The pool's limit also ends loops that no signal handler can.
        logging.getLogger("math_verify").setLevel(logging.ERROR)

    def grade(self, request: GradingRequest) -> Mapping[str, float | str]:
        """See `Grader`."""
        answer = expected_text(request)
        gold = read_answer(answer)
        if not gold:
            raise RewardError(f"the answer {answer!r} is not a mathematical expression")
        response = find(self._pattern, request.response, self._which) if self._pattern else request.response
        if response is None:
            return verdict(False, None)
        if response.strip() == answer:
            return verdict(True, _written(gold))
        theirs = read_answer(response) if self._pattern else read_response(response)
        return verdict(bool(verify(list(gold), list(theirs), timeout_seconds=None)), _written(theirs))

    def can_be_right(self, request: GradingRequest) -> bool:
        """Whether the answer reads as an expression, and not as the letters of its words."""
        read = read_answer(expected_text(request))[:2]
        return bool(read) and not any(isinstance(text, str) and _AMONG_WORDS.search(text) for text in read)


@lru_cache(maxsize=512)
def read_answer(text: str) -> tuple[Any, ...]:
    """Read an answer by math-verify: the expression, and its normalized text. Empty if it reads as nothing."""
    plain = _plain(text)
    if not plain:
        return ()
    if _MATH_INSIDE.search(plain) or _SENTENCE.fullmatch(plain):
        return tuple(parse(plain, parsing_timeout=None))
    bare = plain.rstrip(".") or plain
    read = parse(f"\\boxed{{{bare}}}", [LatexExtractionConfig()], parsing_timeout=None)
    if len(read) < 2 and "\\" not in bare:  # only the text was read: it is no LaTeX
        read = parse(bare, parsing_timeout=None) or read
    return tuple(read) if bare == plain else (*read, plain)  # a response may have the full stop, too


def read_response(text: str) -> tuple[Any, ...]:
    """Read the expressions in a response by math-verify; the response may hold much other text."""
    return tuple(parse(_plain(text), parsing_timeout=None))


def _written(read: Sequence[Any]) -> str:
    """Write what was read as one text: 0.5 as 1/2, and a sum or a power as it stands. Empty if nothing was read."""
    if not read:
        return ""
    expression = read[0]
    floats = expression.atoms(Float) if isinstance(expression, Basic) else ()
    try:
        return str(expression.xreplace({number: Rational(str(number)) for number in floats}) if floats else expression)
    except ValueError:  # an integer of more digits than Python writes
        return str(read[-1])


def _plain(text: str) -> str:
    """Rewrite a text for math-verify: one kind of minus, no tags, and mixed numbers and exponents that it can read."""
    text = _without_tags(text.translate(_MINUS))
    return _EXPONENT.sub(_as_decimal, _MIXED.sub(_as_fraction, text)).strip()


def _without_tags(text: str) -> str:
    """Remove tags. One letter in angle brackets is a tag if it is closed: `1<b>2` has no tag, `<b>2</b>` has one."""
    closed = set(_LETTER_END.findall(text))
    text = _LETTER_TAG.sub(lambda match: " " if match[1] in closed else match[0], text)
    return _TAG.sub(" ", text)


def _as_fraction(match: re.Match[str]) -> str:
    """Write a mixed number as one fraction, so that a sign that follows, such as percent, belongs to all of it."""
    whole = int(match["whole"].replace(",", ""))
    over, under = (int(match[name] or match[f"frac_{name}"] or match[f"digit_{name}"]) for name in ("over", "under"))
    return rf"\frac{{{whole * under + over}}}{{{under}}}" if under else match[0]


def _as_decimal(match: re.Match[str]) -> str:
    return format(Decimal(match[0]), "f")
