"""Rows of a program are prompts, or refused with their number."""

from pathlib import Path
from typing import Any

import pytest

from tailrace.errors import PromptError
from tailrace.prompts.given import written_rows


def test_rows_are_lines_of_json() -> None:
    rows = ({"prompt": f"é{n}", "answer": n, "more": (1.5, None)} for n in range(2))
    assert written_rows(rows).decode() == (
        '{"prompt":"é0","answer":0,"more":[1.5,null]}\n{"prompt":"é1","answer":1,"more":[1.5,null]}\n'
    )


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "prompts is empty"),
        ("abc", "prompts is 'abc'; expected a list of mappings"),
        (5, "prompts is 5; expected a list of mappings"),
        ({"prompt": "x"}, "expected a list of mappings"),
        ([{"prompt": "x"}, "y"], r"prompts\[1\] is 'y'; expected a mapping"),
        ([{"prompt": {1}}], r"prompts\[0\]: prompt is of type set"),
        ([{"prompt": "\ud800"}], r"prompts\[0\]: prompt has '\\ud800', which is no character"),
        ([{"prompt": "x", "a": {"b": [float("nan")]}}], r"prompts\[0\]: has \.nan at a\.b\.0"),
        ([{"prompt": "x", 1: 2}], r"prompts\[0\]: it has the key 1"),
        ([{"prompt": Path("x"), "n": 2**64}], r"prompts\[0\]: has 18446744073709551616 at n"),
    ],
)
def test_what_is_no_row_is_refused_in_one_line(rows: Any, says: str) -> None:
    with pytest.raises(PromptError, match=says) as caught:
        written_rows(rows)
    assert str(caught.value).isprintable()
