"""Runs with workers, without their processes."""

from pathlib import Path

import pytest

from tailrace.cluster.local import LocalCluster
from tests.helpers.local_workers import use_local_workers
from tests.helpers.runs import write_prompts


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts.jsonl")


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> list[LocalCluster]:
    """Run workers in the event loop of the test and the queue in threads, and list the clusters made."""
    return use_local_workers(monkeypatch)
