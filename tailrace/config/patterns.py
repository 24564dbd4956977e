"""Regular expressions of a recipe: find matches. Graders start with this, so it imports no pydantic."""

import re
from collections import deque
from typing import Literal

_PIECE = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?#(?:\\.|[^)\\])*\)|\(\?P<\w+>|\(\?[aiLmsux-]+:|\(\?[^()]?|.", re.DOTALL
)
"""A piece of a pattern: an escape, a class of characters, a comment, the head of a group, or one character."""
_FLAGS = re.compile(r"\(\?[aiLmsux-]+:")
"""The head of a group with other flags."""
_EDGES = frozenset(("^", "$", r"\A", r"\Z", r"\b", r"\B"))
"""Pieces that match no text. Without them a pattern finds all that it found, and maybe more."""
_ELSEWHERE = re.compile(r"\(\?(?:<?[=!]|P=|\(|[aiLmsu]*x)|\\[1-9]")
"""Constructs that look around, refer to another part, or make the pattern verbose."""
_AROUND = ("", " ", "\n")

Which = Literal["first", "last"]
"""Which of several matches counts."""


def can_find(pattern: re.Pattern[str], text: str) -> bool:
    """Return whether `find` can return `text`, perhaps with white space around it, for any text that is searched.

    Return True where that cannot be told, because the pattern looks around or refers back.
    """
    part = _group_1(pattern.pattern) if pattern.groups else pattern.pattern
    if part is None or pattern.flags & re.VERBOSE or _ELSEWHERE.search(part):
        return True
    try:
        wanted = re.compile("".join(piece for piece in _pieces(part) if piece not in _EDGES), pattern.flags)
    except re.error:  # the part alone is not a valid pattern
        return True
    return any(wanted.fullmatch(f"{before}{text}{after}") for before in _AROUND for after in _AROUND)


def _group_1(pattern: str) -> str | None:
    """Return the inside of the first capturing parentheses, with the flags that hold there; None where they are not
    found."""
    pieces = _pieces(pattern)
    heads: list[str] = []
    """The heads of the open groups."""
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
    """Return the text before the parenthesis that closes the group in which `pieces` begin; None where it is not
    found."""
    depth = 1
    for end, piece in enumerate(pieces):
        depth += piece.startswith("(") - (piece == ")")
        if depth == 0:
            return "".join(pieces[:end])
    return None


def _pieces(pattern: str) -> list[str]:
    """Return the pieces of a pattern without comments."""
    return [match[0] for match in _PIECE.finditer(pattern) if not match[0].startswith("(?#")]


def find(pattern: re.Pattern[str], text: str, which: Which) -> str | None:
    """Return group 1 of the chosen match, the whole match where `pattern` has no groups, or None without a match."""
    matches = pattern.finditer(text)
    match = next(matches, None) if which == "first" else next(iter(deque(matches, maxlen=1)), None)
    if match is None:
        return None
    return str(match[1] or "") if pattern.groups else str(match[0])
