"""Rows that a program gives become prompts, or are refused with their number."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from tailrace.config.prompts import JsonlSource, ParquetSource
from tailrace.errors import PromptError
from tailrace.prompts.given import written_rows
from tailrace.prompts.sources.base import Row
from tailrace.prompts.sources.factory import source_rows


def read(tmp_path: Path, rows: list[dict[str, Any]], column: str = "answer") -> list[Row]:
    """Write the rows of a program, and read them as a run does."""
    (tmp_path / "prompts.jsonl").write_bytes(written_rows(rows, column))
    source = JsonlSource(path=str(tmp_path / "prompts.jsonl"), answer_column=column)
    return list(source_rows(source, "prompts.source"))


def test_rows_are_lines_of_json() -> None:
    rows = ({"prompt": f"é{n}", "answer": n, "more": (1.5, None)} for n in range(2))
    assert written_rows(rows, "answer").decode() == (
        '{"prompt":"é0","answer":0,"more":[1.5,null]}\n{"prompt":"é1","answer":1,"more":[1.5,null]}\n'
    )


FLOATS = [4.0, 1e16, 0.1 + 0.2, -0.5, 1e-7, 1e300]


def test_an_answer_that_is_a_float_reads_as_it_does_in_a_parquet_file(tmp_path: Path) -> None:
    pl.DataFrame({"prompt": ["q"] * len(FLOATS), "answer": FLOATS}).write_parquet(tmp_path / "a.parquet")
    file = source_rows(ParquetSource(path=str(tmp_path / "a.parquet")), "prompts.source")
    given = [{"prompt": "q", "answer": answer} for answer in FLOATS]
    assert [row.answer for row in read(tmp_path, given)] == [row.answer for row in file]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (4.0, "4"),
        (1e16, "1" + "0" * 16),
        (np.float64(4), "4"),
        (np.float32(0.1), "0.1"),
        (np.float16(0.1), "0.1"),
        (np.int64(-7), "-7"),
        (np.uint8(7), "7"),
        (2**64 - 1, "18446744073709551615"),
        (np.bool_(True), "true"),
        (True, "true"),
        ("4.0", "4.0"),
        (None, None),
    ],
)
@pytest.mark.parametrize("column", ["answer", "reward_model.truth", "a.b"])
def test_an_answer_is_a_text(tmp_path: Path, answer: Any, text: str | None, column: str) -> None:
    row = {"prompt": "q", "answer": answer, "a.b": answer, "reward_model": {"truth": answer, "x": 1.0}}
    (made,) = read(tmp_path, [row], column)
    assert made.answer == text


def test_numbers_beside_the_answer_stay_numbers(tmp_path: Path) -> None:
    row = {"prompt": "q", "answer": 1.0, "f": 4.0, "big": 1e16, "n": [np.int32(3), {"x": np.float64(0.5)}], "a.b": 2.0}
    (made,) = read(tmp_path, [row])
    assert made.metadata == {"f": 4.0, "big": 1e16, "n": [3, {"x": 0.5}], "a.b": 2.0}
    assert [type(made.metadata[name]) for name in ("f", "big")] == [float, float]
    assert type(made.metadata["n"][0]) is int


ENDLESS: list[Any] = []
ENDLESS += [ENDLESS, ENDLESS]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "prompts is empty"),
        ("abc", "prompts is 'abc'; expected a list of mappings"),
        (5, "prompts is 5; expected a list of mappings"),
        ({"prompt": "x"}, "expected a list of mappings"),
        ([{"prompt": "x"}, "y"], r"prompts\[1\] is 'y'; expected a mapping"),
        ([{"prompt": {1}}], r"^prompts\[0\]\.prompt is of type set"),
        ([{"prompt": "\ud800"}], r"^prompts\[0\]\.prompt has '\\ud800', which is no character"),
        ([{"prompt": "x", "a": {"b": [float("nan")]}}], r"^a row has \.nan at prompts\[0\]\.a\.b\.0, and a"),
        (
            [{"prompt": "x", "answer": float("nan")}],
            r"^a row has \.nan at prompts\[0\]\.answer, and a number has to be",
        ),
        ([{"prompt": "x", "answer": np.float32("inf")}], r"^a row has \.inf at prompts\[0\]\.answer"),
        ([{"prompt": "x", "answer": np.zeros(2)}], r"^prompts\[0\]\.answer is of type ndarray; expected a text"),
        ([{"prompt": "x", 1: 2}], r"^prompts\[0\] has the key 1, which is no text; put it in quotes"),
        ([{"prompt": "x"}, {"prompt": "x", "a": {1: 2}}], r"^prompts\[1\]\.a has the key 1, which is no text"),
        ([{"prompt": Path("x"), "n": 2**64}], r"^a row has 18446744073709551616 at prompts\[0\]\.n, which takes more"),
        ([{"prompt": "x", "n": 2**2000}], r"^prompts\[0\]\.n is a whole number of more than 1024 bits"),
        ([{"prompt": "x", "n": ENDLESS}], r"^prompts\[0\] has more than \d+ mappings and lists within one another"),
    ],
)
def test_what_is_no_row_is_refused_in_one_line(rows: Any, says: str) -> None:
    with pytest.raises(PromptError, match=says) as caught:
        written_rows(rows, "answer")
    assert str(caught.value).isprintable()
