"""Rows by index, and their gradients."""

import torch

from tailrace.trainer.rows import take_rows

INDEX = torch.tensor([2, 0, 2, 2, 3])


def test_rows_and_the_sums_of_their_gradients_equal_those_of_plain_indexing() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(4, 3, generator=generator).requires_grad_()
    upstream = torch.randn(5, 3, generator=generator)
    rows = take_rows(matrix, INDEX)
    assert torch.equal(rows, matrix[INDEX])
    found, wanted = (torch.autograd.grad(taken, matrix, upstream)[0] for taken in (rows, matrix[INDEX]))
    torch.testing.assert_close(found, wanted)
    assert (found[1] == 0).all()
