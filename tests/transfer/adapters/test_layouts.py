from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import ColumnError
from tailrace.transfer.queue.adapters.layouts import Array, Packed, listed, nest, pack, pad, unpack, unpad
from tailrace.transfer.queue.base import Row, RowId
from tests.transfer.tables import tokens

DTYPES: tuple[Any, ...] = (np.int64, np.float32)
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: st.lists(st.lists(st.integers(-9, 9), max_size=5).map(lambda x: np.array(x, dtype)), min_size=1)
)
SIDES: st.SearchStrategy[Literal["left", "right"]] = st.sampled_from(("left", "right"))


def same(got: list[Array], expected: list[Array]) -> None:
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other, strict=True)


def row(number: int, **cells: Any) -> Row:
    return Row(id=RowId(number, 0), group_id=0, order=number, cells=cells)


def test_a_column_is_listed_in_the_order_of_the_rows() -> None:
    same(listed([row(1, ids=tokens(2)), row(0, ids=tokens(3))], "ids"), [tokens(2), tokens(3)])


def test_a_column_that_is_missing_or_holds_no_arrays_is_refused() -> None:
    with pytest.raises(ColumnError, match=r"'ids' of RowId\(slot=1, .*\): got NoneType None, expected an array"):
        listed([row(0, ids=tokens(2)), row(1)], "ids")
    with pytest.raises(ColumnError, match=r"'reward' of .* got float 0\.5, expected an array"):
        listed([row(0, reward=0.5)], "reward")


def test_packed_arrays_lie_one_after_the_other() -> None:
    packed = pack([tokens(2), tokens(0), tokens(3)])
    np.testing.assert_array_equal(packed.values, np.array([0, 1, 0, 1, 2]), strict=True)
    np.testing.assert_array_equal(packed.offsets, np.array([0, 2, 2, 5]), strict=True)


@given(ARRAYS)
def test_packed_arrays_come_back(arrays: list[Array]) -> None:
    packed = pack(arrays)
    same(unpack(packed), arrays)
    assert all(np.shares_memory(array, packed.values) for array in unpack(packed) if len(array))


@pytest.mark.parametrize(
    ("side", "rows"), [("right", [[0, 1, 7], [7, 7, 7], [0, 1, 2]]), ("left", [[7, 0, 1], [7, 7, 7], [0, 1, 2]])]
)
def test_padding_fills_up_to_the_longest(side: Literal["left", "right"], rows: list[list[int]]) -> None:
    padded = pad([tokens(2), tokens(0), tokens(3)], value=7, side=side)
    np.testing.assert_array_equal(padded.values, np.array(rows), strict=True)
    np.testing.assert_array_equal(padded.lengths, np.array([2, 0, 3]), strict=True)


@given(ARRAYS, SIDES)
def test_padded_arrays_come_back(arrays: list[Array], side: Literal["left", "right"]) -> None:
    padded = pad(arrays, value=3, side=side)
    assert padded.values.shape == (len(arrays), max(map(len, arrays)))
    assert np.count_nonzero(padded.values == 3) == padded.values.size - sum(np.count_nonzero(a != 3) for a in arrays)
    same(unpad(padded), arrays)


def test_floats_are_padded_with_any_number_and_ints_with_ints_alone() -> None:
    padded = pad([np.zeros(1, np.float32), np.zeros(0, np.float32)], value=float("nan"))
    np.testing.assert_array_equal(padded.values, np.array([[0], [np.nan]], np.float32), strict=True)
    for value in (0.5, 2**63):
        with pytest.raises(ColumnError, match=rf"int64 arrays cannot be padded with {value}; pass an int of 64 bits"):
            pad([tokens(1)], value=value)


@given(ARRAYS)
def test_a_nested_tensor_has_the_arrays_and_shares_their_memory(arrays: list[Array]) -> None:
    packed = pack(arrays)
    nested = nest(packed)
    same([tensor.numpy() for tensor in nested.unbind()], arrays)
    assert nested.values().data_ptr() == packed.values.ctypes.data or not packed.values.size


def test_a_nested_tensor_never_shares_memory_that_is_read_only() -> None:
    packed = Packed(values=np.frombuffer(tokens(3).tobytes(), np.int64), offsets=np.array([0, 1, 3]))
    nested = nest(packed)
    nested.values()[0] = 9
    same([tensor.numpy() for tensor in nested.unbind()], [np.array([9]), np.array([1, 2])])
    assert packed.values.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ([], r"got 0 arrays of dtypes \[\], expected some of one dtype"),
        ([tokens(1), np.zeros(1, np.float32)], r"got 2 arrays of dtypes \['float32', 'int64'\]"),
    ],
)
def test_arrays_without_one_dtype_are_refused(arrays: list[Array], message: str) -> None:
    with pytest.raises(ColumnError, match=message):
        pack(arrays)
    with pytest.raises(ColumnError, match=message):
        pad(arrays, value=0)
