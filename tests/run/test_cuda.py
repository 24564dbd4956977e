"""Whole runs on a GPU: in one process, and with worker processes that share it; what they tell of time and memory."""

from pathlib import Path
from typing import Any

import pytest

from tailrace.events import read_events
from tailrace.registers.phases import PHASES, PURPOSES
from tailrace.report.breakdown import breakdown_of
from tailrace.report.trace_sink import trace_of_run
from tailrace.run.train import train
from tests.conftest import TinyModel
from tests.helpers.gpu import skip_without_gpu
from tests.helpers.replays import PLAYED, made_trace, replaying
from tests.helpers.runs import small_run, steps_of, write_prompts
from tests.helpers.separated_runs import FULLY_ASYNCHRONOUS, KL, SYNCHRONOUS

skip_without_gpu()
WORKERS = {kind: {"cpus": 0, "gpus": 0.25} for kind in ("rollout", "trainer", "reference")} | {"reward": {"cpus": 0}}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts.jsonl")


def assert_same_steps(one: Path, other: Path) -> None:
    """Assert that the figures of every step are equal up to rounding."""
    for ours, theirs in zip(steps_of(one), steps_of(other), strict=True):
        for name in ("reward", "loss", "grad_norm"):
            assert ours.metrics[name] == pytest.approx(theirs.metrics[name], rel=1e-2, abs=1e-3), (ours.step, name)


def test_a_run_on_a_gpu_takes_the_steps_of_one_on_a_cpu(tmp_path: Path, tiny_model: TinyModel, prompts: Path) -> None:
    for device in ("cpu", "cuda"):
        config = small_run(tmp_path / device, tiny_model("llama"), prompts, device=device, **KL)
        assert train(config, resume=False) == 0
    assert_same_steps(tmp_path / "cuda", tmp_path / "cpu")
    assert max(event.metrics["rollout_mismatch"] for event in steps_of(tmp_path / "cuda")) < 1e-4


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_a_tiny_model_learns_its_task_in_bf16(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, cuda_graphs: bool
) -> None:
    config = small_run(
        tmp_path / "run",
        tiny_model("llama"),
        prompts,
        device="cuda",
        algorithm={"type": "grpo", "group_size": 8},
        trainer={"steps": 15, "train_batch_size": 32, "precision": "bf16", "lr": 3e-3},
        engine={"type": "native", "dtype": "bfloat16", "kv_cache_gib": 0.01, "cuda_graphs": cuda_graphs},
        evaluation={"every": 15},
    )
    assert train(config, resume=False) == 0
    steps = steps_of(tmp_path / "run")
    rewards = [event.metrics["reward"] for event in steps]
    assert sum(rewards[-5:]) >= 2 * sum(rewards[:5])
    assert max(event.metrics["rollout_mismatch"] for event in steps) < 0.05


@pytest.mark.parametrize("medium", ["auto", "gloo"])
def test_workers_that_share_a_gpu_train_as_one_process_does(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, connected_to_ray: None, medium: str
) -> None:
    changes: dict[str, Any] = {"device": "cuda", **KL}
    train(small_run(tmp_path / "colocated", tiny_model("llama"), prompts, **changes), resume=False)
    changes |= {"pipeline": SYNCHRONOUS, "cluster": WORKERS, "weights": {"medium": medium}}
    train(small_run(tmp_path / "separated", tiny_model("llama"), prompts, **changes), resume=False)
    assert_same_steps(tmp_path / "colocated", tmp_path / "separated")


def test_an_asynchronous_run_on_a_gpu_takes_all_its_steps(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, connected_to_ray: None
) -> None:
    changes: dict[str, Any] = {"device": "cuda", "pipeline": FULLY_ASYNCHRONOUS, "cluster": WORKERS, **KL}
    assert train(small_run(tmp_path / "run", tiny_model("llama"), prompts, **changes), resume=False) == 0
    assert [event.samples for event in steps_of(tmp_path / "run")] == [8, 8, 8, 8]


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_a_replay_on_a_gpu_has_exact_lengths_and_tells_where_time_and_memory_went(
    tmp_path: Path, tiny_model: TinyModel, cuda_graphs: bool
) -> None:
    engine = {"type": "native", "dtype": "float32", "kv_cache_gib": 0.01, "cuda_graphs": cuda_graphs}
    assert train(replaying(tmp_path, tiny_model("llama"), device="cuda", engine=engine), resume=False) == 0
    assert trace_of_run(tmp_path / "run").samples.select(PLAYED).equals(made_trace().samples.select(PLAYED))
    events = read_events(tmp_path / "run" / "events.jsonl")
    workers = {worker.worker: worker for worker in breakdown_of(events, steps_of(tmp_path / "run"))}
    for worker in workers.values():
        assert sum(map(worker.share, PHASES)) == pytest.approx(1)
    told = {name for name, share in workers["engine"].parts["generation"].items() if share > 0}
    assert told >= {"prefill", "decode", "scheduling"}
    assert not told & {"sampling", "communication"}, "the host cannot tell these from computing"
    assert all(workers["trainer"].parts["update"][name] > 0 for name in ("forward", "backward", "optimizer"))
    for memory in (event.metrics for event in events if event.task == "memory"):
        assert sum(memory.get(purpose, 0.0) for purpose in PURPOSES) == memory["peak"]
        assert memory["kv_cache_used"] + memory["kv_cache_free"] == pytest.approx(0.01 * 2**30, rel=0.1)
    assert max(event.metrics["activations"] for event in events if event.task == "memory") > 0
