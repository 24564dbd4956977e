from typing import Any

import numpy as np
import pytest
import torch

from tailrace.config.columns import COLUMNS
from tailrace.errors import ColumnError
from tailrace.transfer.queue.adapters.layouts import pad
from tailrace.transfer.queue.adapters.tensors import (
    Column,
    Layout,
    PackedTensor,
    Pad,
    PaddedTensor,
    check_layouts,
    make_batch,
    make_cells,
    make_outputs,
)
from tailrace.transfer.queue.base import Claim, Row, RowId
from tailrace.types import Value

LENGTHS = (2, 0, 3)
CELLS: list[dict[str, Value]] = [
    {
        "prompt_ids": np.arange(length, dtype=np.int64),
        "advantages": np.full(length, 0.5, np.float32),
        "seed": 2**60 + length,
        "reward": length / 3,
        "prompt": f"of {length}",
        "metadata": {"length": length},
    }
    for length in LENGTHS
]
CLAIM = Claim(
    lease_id=7,
    lease_s=60.0,
    task="actor",
    rows=tuple(
        Row(id=RowId(place, 1), group_id=place, order=10 * place, cells=cells, units=(0,))
        for place, cells in enumerate(CELLS)
    ),
)


@pytest.mark.parametrize("layout", ["packed", "nested", Pad(-1), Pad(-1, side="left")])
def test_rows_become_tensors_and_tensors_the_same_rows(layout: Layout) -> None:
    layouts: dict[str, Layout] = {"prompt_ids": layout}
    batch = make_batch(CLAIM, COLUMNS, layouts)
    assert [row.id for row in batch.claim.rows] == [row.id for row in CLAIM.rows]
    assert all(not row.cells for row in batch.claim.rows)
    outputs = make_outputs(batch.claim, batch.columns, COLUMNS)
    for row, cells in zip(CLAIM.rows, CELLS, strict=True):
        assert outputs[row.id].keys() == cells.keys()
        for column, value in cells.items():
            np.testing.assert_array_equal(outputs[row.id][column], value)


def test_a_column_has_the_form_of_its_kind() -> None:
    columns = make_batch(CLAIM, COLUMNS, {"advantages": Pad(0.0)}).columns
    prompts, advantages = columns["prompt_ids"], columns["advantages"]
    assert isinstance(prompts, PackedTensor)
    assert [prompt.tolist() for prompt in prompts.split()] == [[0, 1], [], [0, 1, 2]]
    assert isinstance(advantages, PaddedTensor)
    assert advantages.values.tolist() == [[0.5, 0.5, 0.0], [0.0, 0.0, 0.0], [0.5, 0.5, 0.5]]
    assert isinstance(columns["seed"], torch.Tensor)
    assert columns["seed"].dtype == torch.int64
    assert columns["prompt"] == ["of 2", "of 0", "of 3"]


def test_batches_do_not_share_memory_with_the_queue() -> None:
    for layout in ("packed", "nested", Pad(0)):
        prompts = make_batch(CLAIM, COLUMNS, {"prompt_ids": layout}).columns["prompt_ids"]
        values = prompts.values() if isinstance(prompts, torch.Tensor) else prompts.values  # type: ignore[union-attr]
        values.fill_(9)
    np.testing.assert_array_equal(CELLS[2]["prompt_ids"], [0, 1, 2])


@pytest.mark.parametrize(
    "tokens",
    [
        [torch.tensor([1, 2]), torch.tensor([3, 4])],
        [np.array([1, 2]), np.array([3, 4])],
        torch.tensor([[1, 2], [3, 4]]),
        PackedTensor(values=torch.tensor([1, 2, 3, 4]), offsets=torch.tensor([0, 2, 4])),
    ],
)
def test_arrays_may_come_in_many_forms(tokens: Column) -> None:
    cells = make_cells({"response_ids": tokens, "reward": [1.0, 2.0]}, COLUMNS)
    assert [list(own["response_ids"]) for own in cells] == [[1, 2], [3, 4]]  # type: ignore[arg-type]
    assert [own["reward"] for own in cells] == [1.0, 2.0]


def test_gradients_stay_behind() -> None:
    [cells] = make_cells({"advantages": [torch.ones(2, requires_grad=True)]}, COLUMNS)
    np.testing.assert_array_equal(cells["advantages"], [1.0, 1.0])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"rewards": [1.0]}, "no column 'rewards' in the queue; did you mean 'reward'"),
        ({"reward": [1.0], "seed": [1, 2]}, "column 'seed': got 2 cells, expected one for each of 1 rows"),
        (
            {"advantages": [torch.ones(2, dtype=torch.bfloat16)]},
            r"torch.bfloat16; convert it with .to\(torch.float32\)",
        ),
        ({"reward": torch.tensor(1.0)}, "without dimensions"),
        ({"reward": PaddedTensor(values=torch.ones(1, 1), lengths=torch.ones(1), side="left")}, "it holds float"),
    ],
)
def test_what_is_no_column_of_rows_is_refused(columns: dict[str, Column], message: str) -> None:
    with pytest.raises(ColumnError, match=message):
        make_cells(columns, COLUMNS)


def test_only_columns_of_arrays_have_a_layout() -> None:
    check_layouts({"prompt_ids": "nested"}, CELLS[0], COLUMNS, task="actor")
    with pytest.raises(ColumnError, match="which holds str; only arrays"):
        check_layouts({"prompt": "nested"}, CELLS[0], COLUMNS, task="actor")
    with pytest.raises(ColumnError, match="task 'actor' does not read"):
        check_layouts({"response_ids": "nested"}, CELLS[0], COLUMNS, task="actor")


@pytest.mark.parametrize(
    ("column", "layout", "message"),
    [
        ("prompt_ids", "padded", "a layout 'padded' for column 'prompt_ids': expected 'packed', 'nested', Pad"),
        ("prompt_ids", None, "a layout None for column"),
        ("prompt_ids", Pad, "expected 'packed', 'nested', Pad"),
        ("prompt_ids", Pad(0, side="middle"), "side='middle'.*expected"),  # type: ignore[arg-type]
        ("prompt_ids", Pad(0.5), "int64 arrays cannot be padded with 0.5; pass an int"),
        ("advantages", Pad("0"), "float32 arrays cannot be padded with '0'; pass a float"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_layout_of_a_column_is_refused(column: str, layout: Any, message: str) -> None:
    with pytest.raises(ColumnError, match=message):
        check_layouts({column: layout}, CELLS[0], COLUMNS, task="actor")


def test_a_padded_tensor_is_what_the_layout_makes() -> None:
    arrays = [np.arange(length, dtype=np.int64) for length in LENGTHS]
    found = make_batch(CLAIM, COLUMNS, {"prompt_ids": Pad(5, side="left")}).columns["prompt_ids"]
    assert isinstance(found, PaddedTensor)
    np.testing.assert_array_equal(found.values.numpy(), pad(arrays, value=5, side="left").values)
