"""Training with an engine whose TP changes while batches drain."""

from pathlib import Path

import msgspec
import pytest
import torch

from tailrace.config.engine import NativeEngineConfig
from tailrace.engine.adaptive_tp.profile_key import profile_key
from tailrace.events import read_events
from tailrace.models.architecture import read_architecture
from tailrace.planning.latency import CorrectedPredictor
from tailrace.planning.tp_switch import SwitchController
from tailrace.run.train import train
from tests.conftest import TinyModel
from tests.helpers.local_workers import use_local_workers
from tests.helpers.runs import assert_same_run, small_run
from tests.planning.tp_profiles import made_profile

ENDS = list(range(20, 32))
"""Tokens that end a response, so that lengths differ: about one in eight of the vocabulary."""


def step_s(tp: int, size: int, tokens: int, replicas: int) -> float:
    """TP 2 is quicker for up to five sequences."""
    return 0.3 + 0.001 * size if tp == 1 else 0.055 * size + 0.01


@pytest.mark.parametrize("placement", ["colocated", "separated"])
def test_training_with_adaptive_tp_equals_training_without_it_bit_for_bit(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, monkeypatch: pytest.MonkeyPatch, placement: str
) -> None:
    # decisions by the profile alone, whatever the times of this machine
    monkeypatch.setattr(CorrectedPredictor, "observe", lambda *_: None)
    monkeypatch.setattr(SwitchController, "observe_switch", lambda *_: None)
    use_local_workers(monkeypatch)
    model = tiny_model("llama")
    engine = {"type": "native", "dtype": "float32", "kv_cache_gib": 0.01, "dp": 2, "threads_per_rank": 1}
    sampling = {"max_new_tokens": 40, "stop_token_ids": ENDS}
    common = {"sampling": sampling, "pipeline": {"placement": placement}}
    fixed = small_run(tmp_path / "fixed", model, prompts, engine=engine, **common)
    assert isinstance(fixed.engine, NativeEngineConfig)
    key = profile_key(fixed.engine, read_architecture(model), model="tiny", device=torch.device("cpu"))
    profile = tmp_path / "profile.json"
    msgspec.structs.replace(made_profile(step_s), key=key).write(profile)
    adaptive_tp = {"profile": str(profile), "estimate": "bound", "steps_between": 8}
    changing = small_run(tmp_path / "changing", model, prompts, engine={**engine, "adaptive_tp": adaptive_tp}, **common)
    assert train(fixed, resume=False) == 0
    assert train(changing, resume=False) == 0
    switches = [
        (event.step, event.metrics["target_tp"])
        for event in read_events(tmp_path / "changing" / "events.jsonl")
        if event.task == "adaptive_tp" and "switch_s" in event.metrics
    ]
    assert len([tp for _, tp in switches if tp == 2]) >= 4, "TP rises in each step"
    assert_same_run(tmp_path / "fixed", tmp_path / "changing")
