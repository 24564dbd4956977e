"""Shared fixtures: one torch thread, and tiny random models of every family."""

import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tailrace.events import EventLog

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)

TinyModel = Callable[..., Path]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    """An event log in the test's directory."""
    event_log = EventLog(tmp_path / "events.jsonl")
    yield event_log
    event_log.close()


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    """A device: one thread."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        yield pool


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """`tiny_model("llama")` writes a random Llama once and returns its directory."""
    from tailrace.conformance.tiny import write_tiny_model

    @functools.cache
    def get(family: str, *, head_dim: int = 16) -> Path:
        return write_tiny_model(family, tmp_path_factory.mktemp("models") / family, head_dim=head_dim)

    return get
