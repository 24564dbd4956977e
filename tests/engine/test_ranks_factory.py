"""Errors that are found before ranks are started."""

import pytest
import torch

from tailrace.config.engine import NativeEngineConfig
from tailrace.engine.ranks import factory
from tailrace.engine.ranks.rank_process import RankProcesses
from tailrace.errors import ConfigError
from tests.engine.architectures import small_architecture


def test_kernels_are_compiled_or_refused_before_a_worker_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(factory, "ProcessReplica")
    config = NativeEngineConfig(dp=2, kernels="cpu")
    with pytest.raises(ConfigError, match=r"engine\.kernels=cpu cannot be used: .* multiple of 16"):
        factory.make_replicas(config, small_architecture(), all_processes=RankProcesses(), device=torch.device("cpu"))
