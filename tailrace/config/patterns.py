"""Regular expressions of a recipe: one that compiles, and what it finds."""

import re
from collections import deque
from typing import Annotated, Literal

from pydantic import AfterValidator

_PIECE = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?#(?:\\.|[^)\\])*\)|\(\?P<\w+>|\(\?[aiLmsux-]+:|\(\?[^()]?|.", re.DOTALL
)
"""Of a pattern: an escape, a class of characters, a comment, the head of a group, or one character."""
_FLAGS = re.compile(r"\(\?[aiLmsux-]+:")
"""The head of a group that is matched with other flags."""
_EDGES = frozenset(("^", "$", r"\A", r"\Z", r"\b", r"\B"))
"""Pieces that take no text; without them a pattern finds all that it found, and maybe more."""
_ELSEWHERE = re.compile(r"\(\?(?:<?[=!]|P=|\(|[aiLmsu]*x)|\\[1-9]")
"""What looks around, refers to another part, or is verbose."""
_AROUND = ("", " ", "\n")


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"is not a regular expression ({error})") from None
    return pattern


Pattern = Annotated[str, AfterValidator(_compiles)]
"""A Python regular expression."""
Which = Literal["first", "last"]
"""Of several matches."""


def can_find(pattern: re.Pattern[str], text: str) -> bool:
    """Whether `find` can return `text`, with white space around it maybe, for any text that is searched.

    Where that cannot be told, because the pattern looks around or refers back, it says yes.
    """
    part = _group_1(pattern.pattern) if pattern.groups else pattern.pattern
    if part is None or pattern.flags & re.VERBOSE or _ELSEWHERE.search(part):
        return True
    try:
        wanted = re.compile("".join(piece for piece in _pieces(part) if piece not in _EDGES), pattern.flags)
    except re.error:  # of its own it means nothing
        return True
    return any(wanted.fullmatch(f"{before}{text}{after}") for before in _AROUND for after in _AROUND)


def _group_1(pattern: str) -> str | None:
    """The inside of the first capturing parentheses, with the flags that hold there; None where they are not found."""
    pieces = _pieces(pattern)
    heads: list[str] = []
    """Of the groups that are open."""
    for start, piece in enumerate(pieces):
        if piece == "(" or piece.startswith("(?P<"):
            inside = _up_to_its_end(pieces[start + 1 :])
            flags = [head for head in heads if _FLAGS.fullmatch(head)]
            return None if inside is None else "".join(flags) + inside + ")" * len(flags)
        if piece.startswith("("):
            heads.append(piece)
        elif piece == ")":
            heads.pop()
    return None


def _up_to_its_end(pieces: list[str]) -> str | None:
    """What comes before the parenthesis that closes the group that `pieces` begin in."""
    depth = 1
    for end, piece in enumerate(pieces):
        depth += piece.startswith("(") - (piece == ")")
        if depth == 0:
            return "".join(pieces[:end])
    return None


def _pieces(pattern: str) -> list[str]:
    """All but comments."""
    return [match[0] for match in _PIECE.finditer(pattern) if not match[0].startswith("(?#")]


def find(pattern: re.Pattern[str], text: str, which: Which) -> str | None:
    """Group 1 of the chosen match, the whole match where `pattern` has no groups, or None without a match."""
    matches = pattern.finditer(text)
    match = next(matches, None) if which == "first" else next(iter(deque(matches, maxlen=1)), None)
    if match is None:
        return None
    return str(match[1] or "") if pattern.groups else str(match[0])
