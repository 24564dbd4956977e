"""The errors of rows and outputs that do not fit the table."""

import re
from typing import Any

import numpy as np
import pytest

from tailrace.errors import ColumnError, QueueError
from tailrace.transfer.queue.base import NewRow, RowId
from tailrace.transfer.queue.rows.schema import Schema, check_limit, check_outputs
from tailrace.types import TaskSpec

SCORE = TaskSpec(name="score", reads=("tokens",), writes=("score",))
SCHEMA = Schema([SCORE])
ROW = RowId(0, 0)


def row(cells: Any = None, **numbers: Any) -> NewRow:
    numbers = {"group_id": 1, "group_size": 1, "order": 7, **numbers}
    return NewRow(cells={"tokens": [1]} if cells is None else cells, **numbers)


@pytest.mark.parametrize("name", ["group_id", "group_size", "order", "not_before"])
@pytest.mark.parametrize("value", [1.5, float("nan"), "a", None, True, 2**63, -(2**63) - 1, 2**70, np.float64(2)])
def test_the_numbers_of_a_row_are_integers_of_64_bits(name: str, value: Any) -> None:
    text = f"{name} of a row: got {value!r}, expected an integer of 64 bits, signed"
    with pytest.raises(QueueError, match=re.escape(text)):
        SCHEMA.check_new([row(), row(**{name: value})])


@pytest.mark.parametrize("value", [-(2**63), 2**63 - 1, np.int64(5), np.uint8(5)])
def test_integers_of_any_library_are_integers(value: Any) -> None:
    SCHEMA.check_new([row(group_id=value, group_size=value, order=value, not_before=value)])


def test_a_row_is_a_new_row() -> None:
    with pytest.raises(QueueError, match=r"got dict {'tokens': 1} for a row, expected a NewRow"):
        SCHEMA.check_new([{"tokens": 1}])  # type: ignore[list-item]


@pytest.mark.parametrize("cells", [[1, 2], {1: 2}])
def test_cells_are_values_by_the_names_of_columns(cells: Any) -> None:
    with pytest.raises(ColumnError, match=r"row 7 of group 1: got cells .*, expected values by the names of columns"):
        SCHEMA.check_new([row(cells)])


def test_a_column_that_was_misspelt_is_named_with_the_one_that_is_missing() -> None:
    text = "lacks column 'tokens', which tasks read and none writes; it brings 'token': did you mean 'tokens'?"
    with pytest.raises(ColumnError, match=re.escape(text)):
        SCHEMA.check_new([row({"token": [1], "metadata": {}})])
    with pytest.raises(ColumnError, match=r"which tasks read and none writes$"):
        SCHEMA.check_new([row({"metadata": {}})])


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ([], "missing: ['score']"),
        (["scoer"], "missing: ['score'], not its own: ['scoer']; did you mean 'score'?"),
        (["score", "scoer"], "not its own: ['scoer']"),
        (["score", 3], "not its own: ['3']"),
    ],
)
def test_outputs_that_are_not_the_tasks_are_named(columns: list[Any], text: str) -> None:
    with pytest.raises(ColumnError, match=re.escape(f"{ROW}: task 'score' writes ['score']; {text}") + "$"):
        check_outputs(SCORE, ROW, columns)


@pytest.mark.parametrize("limit", [None, 1, 2**63 - 1, np.int32(4)])
def test_a_limit_is_any_integer_from_1_on(limit: Any) -> None:
    check_limit(limit)
