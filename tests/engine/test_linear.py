"""The matrix in its packed and its plain layout."""

import types

import pytest
import torch
import torch.nn.functional as F

from tailrace.engine.linear import Linear

CPU = torch.device("cpu")


def broken(*_: object) -> torch.Tensor:
    raise RuntimeError("this operator is not what it was")


LACKING = types.SimpleNamespace()
CHANGED = types.SimpleNamespace(_is_mkldnn_bf16_supported=lambda: True, _reorder_linear_weight=broken)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("operators", [None, LACKING, CHANGED], ids=["as they are", "lacking", "changed"])
def test_the_product_is_right_with_and_without_torchs_private_operators(
    monkeypatch: pytest.MonkeyPatch, operators: types.SimpleNamespace | None, bias: bool
) -> None:
    if operators is not None:
        monkeypatch.setattr(torch.ops, "mkldnn", operators)
    random = torch.Generator().manual_seed(0)
    linear = Linear(24, 16, bias=bias, dtype=torch.bfloat16, device=CPU)
    for _ in range(2):  # weights can be replaced
        weight, x = torch.randn(24, 16, generator=random), torch.randn(5, 16, generator=random).bfloat16()
        offset = torch.randn(24, generator=random) if bias else None
        linear.load(weight, offset)
        expected = F.linear(x.float(), weight, offset)
        torch.testing.assert_close(linear(x).float(), expected, atol=0.1, rtol=0.02)
