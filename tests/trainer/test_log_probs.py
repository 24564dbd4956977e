import pytest
import torch

from tailrace.trainer import log_probs
from tailrace.trainer.log_probs import token_log_probs
from tests.trainer.largest import LargestTensor

TOKENS, WIDTH, VOCABULARY = 37, 16, 1009


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).mul_(0.4).requires_grad_()
    target = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    target[:2] = torch.tensor([0, VOCABULARY - 1])
    return hidden, weight, target


def plain(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, temperature: float) -> torch.Tensor:
    return (hidden @ weight.T / temperature).log_softmax(-1).gather(1, target[:, None]).squeeze(1)


@pytest.mark.parametrize("block", [1, 37 * 100, 2**21])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_log_probs_and_gradients_equal_log_softmax(
    monkeypatch: pytest.MonkeyPatch, block: int, temperature: float
) -> None:
    monkeypatch.setattr(log_probs, "MAX_BLOCK_ELEMENTS", block)
    hidden, weight, target = inputs()
    upstream = torch.randn(TOKENS, generator=torch.Generator().manual_seed(1))
    expected = plain(hidden, weight, target, temperature)
    wanted = torch.autograd.grad(expected, (hidden, weight), upstream)
    found = token_log_probs(hidden, weight, target, temperature=temperature, dtype=torch.float32)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    for gradient, want in zip(torch.autograd.grad(found, (hidden, weight), upstream), wanted, strict=True):
        torch.testing.assert_close(gradient, want, atol=1e-5, rtol=1e-5)


def test_bf16_products_keep_an_fp32_softmax_and_an_fp32_gradient() -> None:
    hidden, weight, target = inputs()
    rounded = (hidden.bfloat16() @ weight.bfloat16().T).float()
    expected = rounded.log_softmax(-1).gather(1, target[:, None]).squeeze(1)
    found = token_log_probs(hidden, weight, target, temperature=1.0, dtype=torch.bfloat16)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    wanted = torch.autograd.grad(plain(hidden, weight, target, 1.0).sum(), weight)[0]
    assert (weight.grad - wanted).norm() < 0.02 * wanted.norm()


def test_extreme_logits_stay_finite() -> None:
    hidden, weight, target = inputs()
    found = token_log_probs(hidden * 1e4, weight, target, temperature=1.0, dtype=torch.float32)
    torch.testing.assert_close(found, plain(hidden * 1e4, weight, target, 1.0), rtol=1e-5, atol=1e-1)
    assert torch.isfinite(torch.cat([g.reshape(-1) for g in torch.autograd.grad(found.sum(), (hidden, weight))])).all()


def test_no_tensor_of_tokens_times_vocabulary_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = VOCABULARY * WIDTH  # the size of the head's own gradient
    monkeypatch.setattr(log_probs, "MAX_BLOCK_ELEMENTS", limit)
    assert limit < TOKENS * VOCABULARY / 2
    hidden, weight, target = inputs()
    with LargestTensor() as largest:
        token_log_probs(hidden, weight, target, temperature=1.0, dtype=torch.float32).sum().backward()  # type: ignore[no-untyped-call]
    assert largest.elements == limit
