"""Runs with workers, without their processes."""

from pathlib import Path
from typing import Any

import pytest

from tailrace.cluster.local import LocalCluster
from tests.helpers.runs import write_prompts


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts.jsonl")


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> list[LocalCluster]:
    """Run workers in the event loop of the test, and list the clusters made."""
    made: list[LocalCluster] = []

    def make_cluster(config: Any, _: Any) -> LocalCluster:
        made.append(LocalCluster(config))
        return made[-1]

    monkeypatch.setattr("tailrace.run.separated.make_cluster", make_cluster)
    return made
