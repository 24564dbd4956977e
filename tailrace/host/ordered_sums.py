"""Sums over rows by index that come out the same each time, on every device.

PyTorch's `index_add_`, and so the gradient of `index_select`, adds in any order on a GPU. `index_put_` sorts there, and
adds in any order on a CPU.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def add_rows(matrix_RX: "torch.Tensor", index_N: "torch.Tensor", rows_NX: "torch.Tensor") -> None:
    """Add each row to that row of the matrix which its index names, in place. Matrix and rows may be vectors."""
    if matrix_RX.is_cpu:
        matrix_RX.index_add_(0, index_N, rows_NX)
    else:
        matrix_RX.index_put_((index_N,), rows_NX, accumulate=True)
