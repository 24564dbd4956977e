"""Rows of a matrix by index. The gradients of a row that occurs more than once are added in one order everywhere."""

from typing import Any

import torch

from tailrace.host.ordered_sums import add_rows


def take_rows(matrix_RX: torch.Tensor, index_N: torch.Tensor) -> torch.Tensor:
    """Return the rows that the indexes name, [N, X], differentiable in the matrix."""
    rows_NX: torch.Tensor = _TakeRows.apply(matrix_RX, index_N)  # type: ignore[no-untyped-call]
    return rows_NX


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix_RX: torch.Tensor, index_N: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index_N)
        ctx.shape = matrix_RX.shape
        return matrix_RX.index_select(0, index_N)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index_N,) = ctx.saved_tensors
        exact = torch.promote_types(gradients[0].dtype, torch.float32)  # bf16 would round after each sum
        gradient_RX = gradients[0].new_zeros(ctx.shape, dtype=exact)
        add_rows(gradient_RX, index_N, gradients[0].to(exact))
        return gradient_RX.to(gradients[0].dtype), None
