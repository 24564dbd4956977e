from enum import StrEnum
from typing import Any

import numpy as np
import pytest

from tailrace.config.columns import COLUMNS
from tailrace.errors import ColumnError
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.local.data_plane import DataPlane
from tailrace.transfer.queue.policies.base import CellFacts
from tests.transfer.tables import tokens


class Reason(StrEnum):
    STOP = "stop"


ROW = RowId(0, 0)
CYCLE: list[Any] = []
CYCLE.append(CYCLE)
DEEP: list[Any] = []
for _ in range(4000):
    DEEP = [DEEP]


def stored(**cells: Any) -> DataPlane:
    plane = DataPlane(COLUMNS)
    plane.write(ROW, plane.freeze(cells))
    return plane


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("response_ids", np.zeros(3, np.int32), r"got a int32 array of shape \(3,\), expected a 1-D int64 array"),
        ("response_ids", np.zeros(3, ">i8"), "got a >i8 array"),
        ("response_ids", np.zeros((2, 3), np.int64), r"got a int64 array of shape \(2, 3\), expected a 1-D"),
        ("advantages", np.zeros(3), "got a float64 array .* expected a 1-D float32 array"),
        ("advantages", [1.0, 2.0], r"got list \[1.0, 2.0\], expected a 1-D float32 array"),
        ("seed", True, "got bool True, expected int of 64 bits"),
        ("seed", 1.0, "got float 1.0, expected int"),
        ("seed", np.int64(1), r"got int64 np.int64\(1\), expected int"),
        ("seed", 2**63, "got int 9223372036854775808, expected int of 64 bits, signed"),
        ("seed", -(2**63) - 1, "expected int of 64 bits, signed"),
        ("reward", 1, "got int 1, expected float"),
        ("reward", np.float32(1), "got float32"),
        ("response", b"text", "got bytes b'text', expected str"),
        ("response", "\ud800", "not valid Unicode"),
        ("metadata", {"x": np.int64(1)}, "expected JSON value: .*numpy.int64"),
        ("metadata", {"x": 2**70}, "expected JSON value"),
        ("metadata", CYCLE, "expected JSON value"),
        ("metadata", DEEP, "expected JSON value"),
        ("speed", 1, "unknown column 'speed'"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_column_got_and_expected(column: str, value: Any, message: str) -> None:
    with pytest.raises(ColumnError, match=message) as error:
        DataPlane(COLUMNS).freeze({column: value})
    assert repr(column) in str(error.value)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("seed", 2**63 - 1),
        ("seed", -(2**63)),
        ("reward", float("inf")),
        ("response", "naïve 🙂"),
        ("answer", None),
        ("answer", "42"),
        ("metadata", {"a": [1, None, {"b": 2.5}]}),
    ],
)
def test_values_come_back_as_they_were(column: str, value: Any) -> None:
    assert stored(**{column: value}).read(ROW, [column]) == {column: value}


def test_arrays_come_back_with_their_dtype_even_when_empty() -> None:
    plane = stored(response_ids=tokens(0), advantages=np.array([0.5, np.nan], np.float32))
    cells = plane.read(ROW, ["response_ids", "advantages"])
    np.testing.assert_array_equal(cells["response_ids"], tokens(0), strict=True)
    np.testing.assert_array_equal(cells["advantages"], np.array([0.5, np.nan], np.float32), strict=True)


def test_a_view_with_strides_is_stored_as_its_elements() -> None:
    plane = stored(response_ids=tokens(10)[::-3])
    np.testing.assert_array_equal(plane.read(ROW, ["response_ids"])["response_ids"], [9, 6, 3, 0])
    assert plane.nbytes == 4 * 8


def test_subclasses_of_plain_values_become_plain() -> None:
    cells = stored(finish_reason=Reason.STOP, reward=np.float64(0.5)).read(ROW, ["finish_reason", "reward"])
    assert cells == {"finish_reason": "stop", "reward": 0.5}
    assert [type(value) for value in cells.values()] == [str, float]


def test_a_producer_cannot_change_what_it_stored() -> None:
    array, metadata = tokens(3), {"steps": [1]}
    plane = stored(response_ids=array, metadata=metadata)
    array[0] = 99
    metadata["steps"].append(2)
    cells = plane.read(ROW, ["response_ids", "metadata"])
    np.testing.assert_array_equal(cells["response_ids"], [0, 1, 2])
    assert cells["metadata"] == {"steps": [1]}


def test_a_consumer_cannot_change_what_others_read() -> None:
    plane = stored(response_ids=tokens(3), metadata={"steps": [1]})
    cells: dict[str, Any] = plane.read(ROW, ["response_ids", "metadata"])
    with pytest.raises(ValueError, match="read-only"):
        cells["response_ids"][0] = 99
    with pytest.raises(ValueError, match="WRITEABLE"):
        cells["response_ids"].flags.writeable = True
    cells["metadata"]["steps"].append(2)
    assert plane.read(ROW, ["metadata"]) == {"metadata": {"steps": [1]}}


def test_bytes_are_those_of_the_parts_and_go_back_to_zero() -> None:
    plane = stored(response_ids=tokens(3), seed=1, reward=0.5, response="é")
    assert plane.nbytes == 3 * 8 + 8 + 8 + 8
    plane.write(ROW, plane.freeze({"advantages": np.zeros(5, np.float32), "answer": None}))
    assert plane.nbytes == 48 + 24 + 8
    assert plane.nbytes == len(plane.stored(ROW))
    plane.drop(ROW)
    assert plane.nbytes == 0


def test_cells_of_several_writes_are_read_in_the_order_asked_for() -> None:
    plane = stored(response_ids=tokens(3), seed=1)
    plane.write(ROW, plane.freeze({}))
    plane.write(ROW, plane.freeze({"reward": 0.5, "response": "é"}))
    cells = plane.read(ROW, ["response", "seed", "reward", "response_ids"])
    assert list(cells) == ["response", "seed", "reward", "response_ids"]
    assert (cells["response"], cells["seed"], cells["reward"]) == ("é", 1, 0.5)
    np.testing.assert_array_equal(cells["response_ids"], tokens(3), strict=True)


def test_lengths_are_elements_of_arrays_bytes_of_text_and_json_and_one_for_numbers() -> None:
    cells = DataPlane(COLUMNS).freeze({"response_ids": tokens(3), "response": "é", "metadata": {"a": 1}, "reward": 0.5})
    assert cells.lengths == {"response_ids": 3, "response": 2, "metadata": 4, "reward": 1}


@pytest.mark.parametrize(("versions", "oldest"), [([3, 2, 5], 2), ([0], 0), ([], None)])
def test_the_version_of_cells_is_that_of_the_oldest_token(versions: list[int], oldest: int | None) -> None:
    plane = DataPlane(COLUMNS)
    cells = plane.freeze({"weight_versions": np.array(versions, np.int64), "reward": 0.5})
    assert cells.version == oldest
    assert plane.freeze({"reward": 0.5}).version is None


def test_what_several_writes_stored_is_one_part_for_another_data_plane() -> None:
    plane, facts = DataPlane(COLUMNS), CellFacts(lengths={}, version=None)
    writes: list[dict[str, Any]] = [
        {"response_ids": tokens(3), "reward": 0.5, "metadata": {"a": 1}},
        {"advantages": np.zeros(5, np.float32), "answer": None},
    ]
    for cells in writes:
        written = plane.freeze(cells)
        plane.write(ROW, written)
        facts = CellFacts(lengths={**facts.lengths, **written.lengths})
    other = DataPlane(COLUMNS)
    other.store(ROW, plane.stored(ROW), facts)
    assert other.nbytes == plane.nbytes
    assert repr(other.read(ROW, list(facts.lengths))) == repr(plane.read(ROW, list(facts.lengths)))
