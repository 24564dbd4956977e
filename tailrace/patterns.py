"""Regular expressions of a recipe: one that compiles, and what it finds."""

import re
from collections import deque
from typing import Annotated, Literal

from pydantic import AfterValidator


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


def find(pattern: re.Pattern[str], text: str, which: Which) -> str | None:
    """Group 1 of the chosen match, the whole match where `pattern` has no groups, or None without a match."""
    matches = pattern.finditer(text)
    match = next(matches, None) if which == "first" else next(iter(deque(matches, maxlen=1)), None)
    if match is None:
        return None
    return str(match[1] or "") if pattern.groups else str(match[0])
