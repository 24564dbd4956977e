"""Tests that need a GPU; `make test-gpu` runs them."""

import pytest
import torch


def skip_without_gpu() -> None:
    """Skip the module that calls this, where there is no GPU."""
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no NVIDIA GPU", allow_module_level=True)
