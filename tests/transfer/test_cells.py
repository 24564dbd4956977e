import contextlib
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.config.columns import ColumnKind
from tailrace.errors import ColumnError
from tailrace.transfer.queue.cells import PartCodec, to_bytes, write_rows
from tailrace.types import Value

KINDS = {kind.name.lower(): kind for kind in ColumnKind} | {"more_floats": ColumnKind.FLOATS}
CODEC = PartCodec(KINDS)

FLOATS = st.lists(st.floats(width=32), max_size=5).map(lambda values: np.array(values, np.float32))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "ints": st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5).map(lambda values: np.array(values, np.int64)),
    "floats": FLOATS,
    "more_floats": FLOATS,
    "int": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(),
    "text": st.text(max_size=9),
    "json": JSON,
}
CELLS = st.lists(st.sampled_from(sorted(KINDS)), unique=True).flatmap(
    lambda columns: st.fixed_dictionaries({column: VALUES[column] for column in columns})
)
LENGTHS = st.dictionaries(st.sampled_from([*KINDS, "unknown"]), st.integers(0, 12) | st.integers(-(2**70), 2**70))


def written(cells: dict[str, Value]) -> memoryview:
    return written_together([cells])


def written_together(rows: list[dict[str, Value]]) -> memoryview:
    parts = CODEC.measure_rows(rows)
    memory = memoryview(bytearray(b"\xff" * sum(alike.nbytes for alike in parts)))
    write_rows(parts, memory)
    return memory


def same(got: Value, expected: Value) -> None:
    if isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(got, expected, strict=True)
    else:
        assert (type(got), repr(got)) == (type(expected), repr(expected))


@given(CELLS)
def test_cells_come_back_as_they_were(cells: dict[str, Value]) -> None:
    part = CODEC.measure(cells)
    got = CODEC.read(written(cells), part.lengths, cells)
    assert list(got) == list(cells)
    for column, value in cells.items():
        same(got[column], value)


@given(st.lists(CELLS, max_size=4))
def test_rows_written_together_are_the_rows_written_one_by_one(rows: list[dict[str, Value]]) -> None:
    memory = written_together(rows)
    assert memory == b"".join(to_bytes(CODEC.measure(cells)) for cells in rows) == b"".join(map(written, rows))


@given(st.lists(CELLS, max_size=4))
def test_rows_measured_together_are_the_rows_measured_one_by_one(rows: list[dict[str, Value]]) -> None:
    together = [
        (dict(zip(alike.columns, lengths, strict=True)), size)
        for alike in CODEC.measure_rows(rows)
        for lengths, size in zip(alike.lengths.tolist(), alike.sizes, strict=True)
    ]
    assert together == [(part.lengths, part.nbytes) for part in map(CODEC.measure, rows)]
    assert [list(lengths) for lengths, _ in together] == [list(cells) for cells in rows]


@given(st.lists(CELLS, max_size=4), st.sets(st.sampled_from(sorted(KINDS))))
def test_rows_read_together_are_the_rows_read_one_by_one(rows: list[dict[str, Value]], columns: set[str]) -> None:
    rows = [cells for cells in rows if columns <= cells.keys()]
    parts = list(map(CODEC.measure, rows))
    memories = [memoryview(to_bytes(part)) for part in parts]
    alone = [CODEC.read(memory, part.lengths, columns) for memory, part in zip(memories, parts, strict=True)]
    for column in columns:
        starts = [CODEC.layout(part.lengths).offsets[column] for part in parts]
        places = np.array([*enumerate(starts)], np.int64).reshape(-1, 2)
        lengths = np.array([part.lengths[column] for part in parts], np.int64)
        together = CODEC.read_column(column, memories, places, lengths)
        assert repr(together) == repr([cells[column] for cells in alone])


@given(CELLS)
def test_a_layout_is_aligned_without_gaps_and_as_long_as_what_was_measured(cells: dict[str, Value]) -> None:
    part = CODEC.measure(cells)
    layout = CODEC.layout(part.lengths)
    assert layout.nbytes == part.nbytes
    assert list(layout.offsets) == list(cells)
    units = {"ints": 8, "floats": 4, "more_floats": 4, "int": 8, "float": 8}
    end = 0
    for column, offset in layout.offsets.items():
        assert offset == end
        end += -(-part.lengths[column] * units.get(column, 1) // 8) * 8
    assert layout.nbytes == end


@given(CELLS, CELLS)
def test_parts_of_one_row_joined_are_a_part(first: dict[str, Value], second: dict[str, Value]) -> None:
    second = {column: value for column, value in second.items() if column not in first}
    parts = [CODEC.measure(first), CODEC.measure(second)]
    joined = CODEC.measure({**first, **second})
    assert b"".join(map(to_bytes, parts)) == to_bytes(joined)
    assert {**parts[0].lengths, **parts[1].lengths} == joined.lengths


def test_the_encoding_is_what_the_module_says() -> None:
    cells: dict[str, Value] = {
        "more_floats": np.array([1.0], np.float32),
        "ints": np.array([1, -2]),
        "text": "é",
        "int": -1,
        "json": [1],
        "float": 1.0,
    }
    assert written(cells).hex(" ", 8).split() == [
        "0000803f00000000",
        "0100000000000000",
        "feffffffffffffff",
        "c3a9000000000000",
        "ffffffffffffffff",
        "9101000000000000",
        "000000000000f03f",
    ]
    assert CODEC.measure(cells).lengths == {"more_floats": 1, "ints": 2, "text": 2, "int": 1, "json": 2, "float": 1}


def test_arrays_are_read_in_place_and_cannot_be_written() -> None:
    cells: dict[str, Value] = {"text": "abc", "ints": np.arange(3), "floats": np.ones(3, np.float32)}
    memory = written(cells)
    lengths = CODEC.measure(cells).lengths
    got: dict[str, Any] = CODEC.read(memory, lengths, ["ints", "floats"])
    for column in got:
        assert np.shares_memory(got[column], np.frombuffer(memory, np.uint8))
        with pytest.raises(ValueError, match="WRITEABLE"):
            got[column].flags.writeable = True
    memory[8:16] = (99).to_bytes(8, "little")
    assert got["ints"].tolist() == [99, 1, 2]


def test_arrays_with_strides_are_written_as_their_elements() -> None:
    array = np.arange(10)[::-3]
    assert written({"ints": array}) == to_bytes(CODEC.measure({"ints": array})) == np.array([9, 6, 3, 0]).tobytes()


def test_measuring_copies_no_array() -> None:
    array = np.arange(3)
    [chunk] = CODEC.measure({"ints": array}).chunks
    assert chunk is array


def test_memory_of_another_size_is_not_written() -> None:
    parts = CODEC.measure_rows([{"int": 1}])
    with pytest.raises(AssertionError, match="the parts need 8 bytes, the memory has 16"):
        write_rows(parts, memoryview(bytearray(16)))


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ({"ints": -1}, "column 'ints': got a cell of length -1, expected 0 or more"),
        ({"int": 0}, "column 'int': got a cell of length 0, expected 1"),
        ({"float": 2}, "column 'float': got a cell of length 2, expected 1"),
        ({"ints": 3}, "the lengths of a part need 24 bytes, the memory has 16"),
        ({"text": 2**62}, "need 4611686018427387904 bytes"),
        ({"int": 1}, "need 8 bytes, the memory has 16"),
        ({"unknown": 1}, r"unknown column 'unknown'; known: \['float', "),
        ({"int": 1, "float": 1}, r"column 'ints' is not in the part; it has \['float', 'int'\]"),
    ],
)
def test_lengths_that_do_not_fit_are_an_error_that_says_how(lengths: dict[str, int], message: str) -> None:
    with pytest.raises(ColumnError, match=message):
        CODEC.read(memoryview(bytes(16)), lengths, ["ints"])


@pytest.mark.parametrize(
    ("column", "data", "message"),
    [
        ("text", b"\xff", "column 'text': its 1 bytes are corrupt .*invalid start byte"),
        ("json", b"\xc1", "column 'json': its 1 bytes are corrupt"),
        ("json", b"", "column 'json': its 0 bytes are corrupt"),
        ("json", b"\x00\x00", "column 'json': its 2 bytes are corrupt"),
        ("json", b"\x81\x80\x00", "column 'json': its 3 bytes are corrupt"),
        ("json", b"\x91" * 100_000, "column 'json': its 100000 bytes are corrupt"),
    ],
)
def test_corrupt_bytes_are_an_error_that_names_the_column(column: str, data: bytes, message: str) -> None:
    memory = memoryview(data + bytes(-len(data) % 8))
    with pytest.raises(ColumnError, match=message):
        CODEC.read(memory, {column: len(data)}, [column])


@pytest.mark.parametrize(
    "claim", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xdc\xff\xff"]
)
def test_json_that_claims_more_than_is_there_gets_no_memory(claim: bytes) -> None:
    data = claim * 100
    memory = memoryview(data + bytes(-len(data) % 8))
    tracemalloc.start()
    try:
        with pytest.raises(ColumnError, match="corrupt"):
            CODEC.read(memory, {"json": len(data)}, ["json"])
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=64), LENGTHS)
def test_garbage_is_read_or_refused(data: bytes, lengths: dict[str, int]) -> None:
    try:
        cells = CODEC.read(memoryview(data), lengths, lengths)
    except ColumnError:
        return
    assert list(cells) == list(lengths)


@given(CELLS, st.data())
def test_a_damaged_part_is_read_or_refused(cells: dict[str, Value], data: st.DataObject) -> None:
    lengths = CODEC.measure(cells).lengths
    memory = written(cells)
    for _ in range(data.draw(st.integers(0, 4)) if memory else 0):
        memory[data.draw(st.integers(0, len(memory) - 1))] = data.draw(st.integers(0, 255))
    try:
        got: dict[str, Any] = CODEC.read(memory, lengths, lengths)
    except ColumnError:
        return
    assert {column: len(got[column]) for column in got if isinstance(got[column], np.ndarray)} == {
        column: lengths[column] for column in cells if isinstance(cells[column], np.ndarray)
    }


@given(st.lists(st.integers(0, 255) | st.integers(0x80, 0x9F) | st.integers(0xC0, 0xDF), max_size=40).map(bytes))
def test_any_bytes_of_json_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(ColumnError):
        CODEC.read(memoryview(data + bytes(-len(data) % 8)), {"json": len(data)}, ["json"])


@given(st.lists(st.sampled_from(sorted(KINDS)), unique=True), st.data())
@settings(max_examples=100)
def test_many_parts_are_measured_as_each_alone(columns: list[str], data: st.DataObject) -> None:
    row = st.tuples(*(st.just(1) if column in ("int", "float") else st.integers(0, 99) for column in columns))
    rows = data.draw(st.lists(row, min_size=1, max_size=5))
    lengths = np.array(rows, np.int64).reshape(len(rows), len(columns))
    layouts = [CODEC.layout(dict(zip(columns, of_row, strict=True))) for of_row in rows]
    sizes = CODEC.cell_sizes(columns, lengths)
    for times in (1, 40):  # few parts are measured one by one
        many = np.tile(lengths, (times, 1))
        assert CODEC.sizes(columns, many) == times * [layout.nbytes for layout in layouts]
    assert (np.cumsum(sizes, axis=1) - sizes).tolist() == [list(layout.offsets.values()) for layout in layouts]


@pytest.mark.parametrize(
    ("columns", "lengths", "message"),
    [
        (["ints", "height"], [1, 1], "unknown column 'height'"),
        (["ints", "ints"], [1, 1], "each column once"),
        (["ints", "int"], [1, 2], "column 'int': got a cell of length 2, expected 1"),
        (["ints", "text"], [1, -1], "column 'text': got a cell of length -1, expected 0 to"),
        (["ints", "text"], [2**62, 1], "column 'ints': got a cell of length 4611686018427387904, expected 0 to"),
    ],
)
def test_lengths_of_no_cell_are_not_measured(columns: list[str], lengths: list[int], message: str) -> None:
    with pytest.raises(ColumnError, match=message):
        CODEC.sizes(columns, np.array([[1, 1], lengths], np.int64))
    with pytest.raises(ColumnError, match=message):
        CODEC.sizes(columns, np.array([*[[1, 1]] * 40, lengths], np.int64))
