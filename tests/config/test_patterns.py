"""Whether a pattern can ever find a text."""

import re

import pytest

from tailrace.config.patterns import can_find, find

SOLUTION = "She has 3 * 4 = 12.\n#### 12"


@pytest.mark.parametrize(
    ("pattern", "text", "can"),
    [
        (r"-?\d+", "42", True),
        (r"-?\d+", "-42", True),
        (r"-?\d+", SOLUTION, False),
        (r"-?\d+", "4.5", False),
        (r"^\d+$", "42", True),
        (r"\b\d+\b", "42", True),
        (r"\b\d+\b", SOLUTION, False),
        (r"#### (.+)", "42", True),
        (r"#### (.+)", SOLUTION, False),
        (r"(?s)#### (.+)", SOLUTION, True),
        (r"#### \d+", "42", False),
        (r"<answer>(.*?)</answer>", "x + 1", True),
        (r"<answer>(\s+\d+\s+)</answer>", "7", True),
        (r"(?:a|b)[(]?(?P<n>[)\d]+)\)", "42", True),
        (r"(?:a|b)[(]?(?P<n>[)\d]+)\)", "x", False),
        (r"\((\d+)\)", "42", True),
        (r"\(([A-E])\)", "B", True),
        (r"\(([A-E])\)", "b", False),
        (r"(?i)\(([A-E])\)", "b", True),
        (r"(?i:answer: (yes|no))", "YES", True),
        (r"(?i:answer: (yes|no))", "maybe", False),
        (r"(?i:answer:) (yes|no)", "YES", False),
        (r"(?i)answer: (?-i:(yes|no))", "YES", False),
        (r"(?i)answer: (?-i:(yes|no))", "yes", True),
        (r"(?i:yes|no)", "YES", True),
        (r"(?i:yes|no)", "maybe", False),
        (r"(?s:<a>(?:x|(.*))</a>)", "a\nb", True),
        (r"<a>(.*)(?s:.*)</a>", "a\nb", False),
        (r"(?x:= (\d) )", "x", True),
        (r"(?#the (first\) of them)= (\d+)", "42", True),
        (r"(?#the (first\) of them)= (\d+)", "first", False),
        (r"(\d+(?#not ( or [))", "42", True),
        (r"\d+(?#[0-9)", "42", True),
        (r"((\d)+)", "42", True),
        (r"(?<=#### )\d+", "42", True),
        (r"(?<=#### )\d+", "x", True),
        (r"(a)\1", "b", False),
        ("(?x) \\( (\\d) \\) # a digit", "x", True),
        ("", "", True),
    ],
)
def test_a_pattern_can_find_what_it_or_its_group_matches(pattern: str, text: str, can: bool) -> None:
    """The answer is yes where it cannot be known."""
    assert can_find(re.compile(pattern), text) is can


@pytest.mark.parametrize(
    ("pattern", "text"),
    [(r"-?\d+", "a 42 b"), (r"\[([^]]+)\]", "so [x)]"), (r"(?:(a)|b)(c)", "ac"), (r"=\s*(\S+)$", "x = 7")],
)
def test_what_was_found_can_be_found(pattern: str, text: str) -> None:
    found = find(re.compile(pattern), text, "last")
    assert found is not None
    assert can_find(re.compile(pattern), found.strip())
