"""The trainer on a GPU keeps the trainer's contract."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tailrace.config.trainer import SingleTrainerBackend
from tailrace.conformance.samples import make_samples
from tailrace.conformance.trainer import TrainerContract
from tailrace.trainer.rows import take_rows
from tests.conftest import TinyModel
from tests.helpers.gpu import skip_without_gpu

skip_without_gpu()


def test_a_rows_gradients_are_added_in_one_order() -> None:
    matrix = torch.randn(5, 512, device="cuda").requires_grad_()
    index = torch.randint(0, 5, (20_000,), device="cuda")
    upstream = torch.randn(20_000, 512, device="cuda")
    first, *others = (torch.autograd.grad(take_rows(matrix, index), matrix, upstream)[0] for _ in range(5))
    assert all(torch.equal(other, first) for other in others)


class TestSingle(TrainerContract):
    backend = SingleTrainerBackend()
    device = "cuda"

    def test_bf16_stays_close_to_fp32(self, model_dir: Path) -> None:
        samples = make_samples()
        whole, rounded = (self.make(model_dir, precision=p).log_probs(samples) for p in ("fp32", "bf16"))
        for one, other in zip(whole, rounded, strict=True):
            np.testing.assert_allclose(other, one, atol=0.1)


class TestSingleWithQwen3(TestSingle):
    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, tiny_model: TinyModel) -> Path:
        return tiny_model("qwen3")
