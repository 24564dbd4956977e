"""Shared fixtures: one torch thread, and tiny random models of every family."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)

TinyModel = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """`tiny_model("llama")` writes a random Llama once and returns its directory."""
    from tests.tiny import write_tiny_model

    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = write_tiny_model(family, tmp_path_factory.mktemp("models") / family)
        return made[family]

    return get
