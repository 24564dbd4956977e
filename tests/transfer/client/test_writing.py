import numpy as np

from tailrace.config.columns import ColumnKind
from tailrace.transfer.queue.cells import PartCodec, to_bytes
from tailrace.transfer.queue.client.writing import Batch
from tailrace.types import Value
from tests.transfer.tables import tokens

CODEC = PartCodec({"ids": ColumnKind.INTS, "text": ColumnKind.TEXT})
ROWS: list[dict[str, Value]] = [
    {"ids": tokens(2), "text": "abc"},
    {"ids": tokens(0), "text": ""},
    {"text": "d"},
    {"text": "ef", "ids": tokens(1)},
]
PARTS = CODEC.measure_rows(ROWS)
BYTES = [to_bytes(CODEC.measure(cells)) for cells in ROWS]


def test_consecutive_rows_with_cells_in_the_same_columns_are_a_run() -> None:
    runs = Batch(PARTS).runs
    assert [(run.rows, run.columns) for run in runs] == [(2, ["ids", "text"]), (1, ["text"]), (1, ["text", "ids"])]
    np.testing.assert_array_equal(runs[0].table(), [[2, 3], [0, 0]])


def test_the_parts_of_a_run_are_its_frame_and_those_of_all_fill_one_memory() -> None:
    batch = Batch(PARTS)
    assert [bytes(frame) for frame in batch.frames] == [BYTES[0] + BYTES[1], BYTES[2], BYTES[3]]
    memory = memoryview(bytearray(batch.nbytes))
    batch.write(memory)
    assert bytes(memory) == b"".join(BYTES)


def test_a_run_is_cut_where_its_frame_would_be_too_long() -> None:
    alike = CODEC.measure_rows([ROWS[0]] * 5)
    batch = Batch(alike, frame_bytes=2 * len(BYTES[0]) + 1)
    assert [run.rows for run in batch.runs] == [2, 2, 1]
    assert [bytes(frame) for frame in batch.frames] == [2 * BYTES[0], 2 * BYTES[0], BYTES[0]]
    assert [run.rows for run in Batch(alike, frame_bytes=1).runs] == [1, 1, 1, 1, 1]


def test_some_rows_of_a_batch_are_a_batch_and_all_of_them_are_itself() -> None:
    batch = Batch(PARTS)
    assert [bytes(frame) for frame in batch.take([1, 3]).frames] == [BYTES[1], BYTES[3]]
    assert batch.take([0, 1, 2, 3]) is batch


def test_rows_without_columns_are_a_run_of_nothing() -> None:
    batch = Batch(CODEC.measure_rows([{}, {}]))
    assert len(batch) == 2
    assert [(run.rows, run.columns, run.lengths) for run in batch.runs] == [(2, [], b"")]
    assert [bytes(frame) for frame in batch.frames] == [b""]
