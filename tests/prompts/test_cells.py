"""Cells of a source: how answers, metadata and nested columns are read."""

import json
import math
from datetime import date, datetime
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.config.prompts import JsonlSource, ParquetSource, PromptSource
from tailrace.errors import PromptError
from tailrace.prompts.sources.base import Row
from tailrace.prompts.sources.cells import answer_text
from tailrace.prompts.sources.factory import source_rows


def read(source: PromptSource) -> list[Row]:
    return list(source_rows(source, "prompts.source"))


def jsonl(tmp_path: Path, *lines: str, **columns: Any) -> JsonlSource:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return JsonlSource(path=str(path), **columns)


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("1.50", "1.50"),
        ("1e16", "1e16"),
        ("-0.0", "-0.0"),
        ("0.30000000000000004", "0.30000000000000004"),
        ("12345678901234567890.0", "12345678901234567890.0"),
        ("9" * 5000, "9" * 5000),
        ("1E400", "1E400"),
        ("true", "true"),
        ("false", "false"),
        ("null", None),
        ('""', ""),
        ('" 1.50"', " 1.50"),
    ],
)
def test_a_json_answer_is_the_text_that_stands_in_the_file(tmp_path: Path, written: str, answer: str | None) -> None:
    (row,) = read(jsonl(tmp_path, f'{{"prompt": "q", "answer": {written}}}'))
    assert row.answer == answer
    assert type(row.answer) in (str, type(None))


def answers(tmp_path: Path, series: pl.Series) -> list[str | None]:
    pl.DataFrame({"prompt": ["q"] * len(series), "answer": series}).write_parquet(tmp_path / "a.parquet")
    return [row.answer for row in read(ParquetSource(path=str(tmp_path / "a.parquet")))]


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        (
            [4.0, 1e16, 0.1 + 0.2, -0.5, 1e-7, math.nan, None],
            pl.Float64,
            ["4", "1" + "0" * 16, "0.30000000000000004", "-0.5", "0.0000001", None, None],
        ),
        ([0.1, 3.0, math.nan, 16777216.0], pl.Float32, ["0.1", "3", None, "16777216"]),
        (
            [Decimal("1.50"), Decimal("4.00"), Decimal("12345678901234567890.25"), None],
            pl.Decimal(30, 2),
            ["1.5", "4", "12345678901234567890.25", None],
        ),
        ([2**63 - 1, -1, None], pl.Int64, ["9223372036854775807", "-1", None]),
        ([date(2026, 1, 2), None], pl.Date, ["2026-01-02", None]),
        ([datetime(2026, 1, 2, 3, 4, 5)], pl.Datetime, ["2026-01-02T03:04:05"]),
        ([True, False, None], pl.Boolean, ["true", "false", None]),
        (["a", None], pl.Categorical, ["a", None]),
        ([None, None], pl.Null, [None, None]),
    ],
)
def test_a_parquet_answer_is_its_shortest_exact_decimal(
    tmp_path: Path, values: list[Any], kind: Any, expected: list[str | None]
) -> None:
    assert answers(tmp_path, pl.Series(values, dtype=kind)) == expected


def test_narrow_floats_inside_a_struct_read_as_they_were_written(tmp_path: Path) -> None:
    struct = pl.Series([{"truth": 0.1}], dtype=pl.Struct({"truth": pl.Float32}))
    pl.DataFrame({"prompt": ["q"], "reward_model": struct}).write_parquet(tmp_path / "a.parquet")
    (row,) = read(ParquetSource(path=str(tmp_path / "a.parquet"), answer_column="reward_model.truth"))
    assert row.answer == "0.1"


def test_an_infinite_answer_is_refused_with_its_row(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"a.parquet:1, column 'answer': an answer must be a finite number, not inf"):
        answers(tmp_path, pl.Series([1.0, math.inf]))


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_the_text_of_a_float_is_a_decimal_that_reads_as_the_same_float(value: float) -> None:
    text = answer_text(value)
    assert text is not None
    assert "e" not in text
    assert float(text) == value
    assert not text.endswith((".", ".0"))


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_the_text_of_a_narrow_float_is_no_longer_than_its_digits(value: float) -> None:
    text = answer_text(value, np.float32)
    assert text is not None
    assert np.float32(text) == np.float32(value)
    assert len(text.strip("-0.").replace(".", "").strip("0")) <= 9


@given(st.decimals(allow_nan=False, allow_infinity=False, places=6))
def test_the_text_of_a_decimal_is_exact(value: Decimal) -> None:
    text = answer_text(value)
    assert text is not None
    assert Fraction(text) == Fraction(value)


def test_numbers_in_metadata_stay_numbers(tmp_path: Path) -> None:
    line = '{"prompt": "q", "m": {"i": 3, "f": 1.50, "e": 1e3, "big": 18446744073709551615, "l": [null, true]}}'
    (row,) = read(jsonl(tmp_path, line, answer_column=None))
    assert row.metadata == {"m": {"i": 3, "f": 1.5, "e": 1000.0, "big": 2**64 - 1, "l": [None, True]}}
    assert json.loads(json.dumps(row.metadata)) == row.metadata
    assert type(row.metadata["m"]["i"]) is int
    assert type(row.metadata["m"]["e"]) is float


def test_missing_numbers_in_metadata_are_null(tmp_path: Path) -> None:
    pl.DataFrame({"prompt": ["q"], "answer": ["a"], "x": [math.nan], "y": [[1.0, math.nan]]}).write_parquet(
        tmp_path / "a.parquet"
    )
    (row,) = read(ParquetSource(path=str(tmp_path / "a.parquet")))
    assert row.metadata == {"x": None, "y": [1.0, None]}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("1e400", "holds '1e400', which is no finite number"),
        ("9" * 30, "which takes more than 64 bits; write it as a text"),
        ("-9223372036854775809", "which takes more than 64 bits"),
        ("[" * 70 + "]" * 70, "is nested more than 64 levels deep"),
    ],
)
def test_metadata_that_json_cannot_keep_is_refused_with_its_column(tmp_path: Path, value: str, message: str) -> None:
    with pytest.raises(PromptError, match=r"data.jsonl:1, column 'm':? ") as caught:
        read(jsonl(tmp_path, f'{{"prompt": "q", "answer": 1, "m": {value}}}'))
    assert message in str(caught.value)


VERL = json.dumps(
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "2+2?"}],
        "reward_model": {"ground_truth": "4", "style": "rule"},
        "extra_info": {"question": "two and two?", "deep": {"er": 3}},
    }
)


def test_a_dotted_path_leads_into_nested_columns(tmp_path: Path) -> None:
    (row,) = read(jsonl(tmp_path, VERL, answer_column="reward_model.ground_truth"))
    assert (row.prompt, row.answer) == ([{"role": "user", "content": "2+2?"}], "4")
    assert set(row.metadata) == {"data_source", "reward_model", "extra_info"}
    columns = {"prompt_column": "extra_info.question", "answer_column": "extra_info.deep.er"}
    (row,) = read(jsonl(tmp_path, VERL, **columns))
    assert (row.prompt, row.answer) == ("two and two?", "3")


def test_a_column_whose_own_name_has_dots_goes_first(tmp_path: Path) -> None:
    line = json.dumps({"a.b": "literal", "a": {"b": "nested", "b.c": "half"}, "prompt": "q"})
    assert read(jsonl(tmp_path, line, answer_column="a.b"))[0].answer == "literal"
    assert read(jsonl(tmp_path, line, answer_column="a.b.c"))[0].answer == "half"


def test_a_missing_nested_column_names_the_nearest_path(tmp_path: Path) -> None:
    with pytest.raises(PromptError) as caught:
        read(jsonl(tmp_path, VERL, answer_column="reward_model.groundtruth"))
    assert "data.jsonl:1 has no column 'reward_model.groundtruth' (prompts.source.answer_column)" in str(caught.value)
    assert str(caught.value).endswith("did you mean 'reward_model.ground_truth'?")
