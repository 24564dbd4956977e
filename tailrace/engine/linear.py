"""A matrix that the engine multiplies with, in the layout that its device reads fastest."""

import torch
import torch.nn.functional as F


class Linear:
    """y = x Wᵀ + b, with weights that can be replaced while the engine lives.

    On CPUs with bf16 instructions the matrix is kept in oneDNN's blocked layout: a plain one is reordered inside every
    call, which at decode sizes costs as much as the product (measured 2x at batch 1, 1.2x at batch 64).
    """

    def __init__(self, rows: int, columns: int, *, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        self._packs = device.type == "cpu" and dtype == torch.bfloat16 and _cpu_packs_bf16()
        self._weight = torch.empty(0 if self._packs else rows, columns, dtype=dtype, device=device)
        self._bias = torch.zeros(rows, dtype=dtype, device=device) if bias else None

    def load(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Copy new values in. weight: [rows, columns]; bias: [rows], where the matrix has one."""
        if self._packs:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.to(torch.bfloat16).contiguous())
        else:
            self._weight.copy_(weight)
        if self._bias is not None and bias is not None:
            self._bias.copy_(bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, columns] → [T, rows]"""
        if self._packs:
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return product
        return F.linear(x, self._weight, self._bias)


def _cpu_packs_bf16() -> bool:
    """Whether packing works here; its operators are private to torch, so a build may lack or a release change them."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    ones = torch.ones(2, 8, dtype=torch.bfloat16)
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        packed = torch.ops.mkldnn._reorder_linear_weight(ones)
        product = torch.ops.mkldnn._linear_pointwise(ones, packed, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return bool(torch.equal(product, torch.full_like(product, 8)))
