"""The engine on a GPU keeps the contract of engines, with CUDA graphs and without."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from tailrace.config.engine import NativeEngineConfig
from tailrace.conformance.engine import EngineContract
from tailrace.conformance.requests import make_request, same_tokens
from tailrace.engine.collectives.process_group import ProcessGroupCollective
from tailrace.engine.decoder.graphs import DecodeGraphs
from tailrace.errors import ConfigError
from tailrace.types import Request, Sample
from tests.conftest import TinyModel
from tests.engine.helpers import make_core, run_core
from tests.engine.switching import make_switching_core, responses, wander
from tests.helpers.gpu import skip_without_gpu

skip_without_gpu()
CUDA = torch.device("cuda")


@pytest.fixture(scope="class")
def shared_gpu() -> Iterator[None]:
    """Give every rank the first GPU. Ranks exchange by gloo then, since nccl refuses to serve two on one GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tailrace.engine.ranks.process.rank_device", lambda *_: torch.device("cuda:0"))
        yield


class CudaContract(EngineContract):
    device = "cuda"


class TestNative(CudaContract):
    config = NativeEngineConfig(dtype="float32", block_size=8, kv_cache_gib=0.01, prefill_tokens=300)


class TestNativeWithGraphs(CudaContract):
    config = NativeEngineConfig(dtype="float32", block_size=8, kv_cache_gib=0.01, prefill_tokens=300, cuda_graphs=True)


class TestNativeInBfloat16(CudaContract):
    config = NativeEngineConfig(kv_cache_gib=0.01)
    tolerance = 0.1
    outliers = 0.2


class TestNativeInBfloat16WithGraphs(CudaContract):
    config = NativeEngineConfig(kv_cache_gib=0.01, cuda_graphs=True)
    tolerance = 0.1
    outliers = 0.2


@pytest.mark.usefixtures("shared_gpu")
class TestNativeWithTwoShards(CudaContract):
    config = NativeEngineConfig(dtype="float32", tp=2, block_size=8, kv_cache_gib=0.01, collectives="gloo")


def mixed_requests() -> list[Request]:
    """Requests that leave one after the other, so that steps of all sizes occur."""
    return [
        make_request(i, prompt=3 + 5 * i, max_new_tokens=4 + 9 * i, temperature=float(i % 2), ignore_eos=True)
        for i in range(19)
    ]


def generate(model_dir: Path, **config: object) -> dict[int, Sample]:
    with closing(make_core(model_dir, device="cuda", **config)) as core:
        return run_core(core, mixed_requests())


def test_graphs_change_no_token_of_a_batch_that_drains(tiny_model: TinyModel) -> None:
    plain, captured = (generate(tiny_model("qwen3"), cuda_graphs=graphs) for graphs in (False, True))
    assert same_tokens(plain, captured)
    for request_id, sample in plain.items():
        np.testing.assert_allclose(captured[request_id].rollout_log_probs, sample.rollout_log_probs, atol=1e-4)


def test_a_gpu_draws_the_tokens_that_a_cpu_draws(tiny_model: TinyModel) -> None:
    with closing(make_core(tiny_model("qwen2"))) as core:
        expected = run_core(core, mixed_requests())
    assert same_tokens(generate(tiny_model("qwen2")), expected)


@torch.inference_mode()
def test_a_graph_is_captured_once_for_each_size_and_computes_with_what_is_there_now() -> None:
    weight = torch.ones(8, 3, device=CUDA)
    calls: list[torch.Size] = []

    def decode(inputs_BX: torch.Tensor) -> torch.Tensor:
        calls.append(inputs_BX.shape)
        return weight[inputs_BX[:, 0]] + inputs_BX[:, 1:2]

    graphs = DecodeGraphs(decode, CUDA)
    inputs = np.array([[1, 10, 0], [2, 20, 0], [7, 30, 0]])
    assert graphs(inputs).tolist() == [[11.0] * 3, [21.0] * 3, [31.0] * 3]
    captured = len(calls)
    weight.mul_(3)
    assert graphs(inputs[::-1].copy()).tolist() == [[33.0] * 3, [23.0] * 3, [13.0] * 3]
    assert graphs(np.array([*inputs, [0, 40, 0]])).tolist()[3] == [43.0] * 3
    assert len(calls) == captured
    assert graphs(inputs[:1]).tolist() == [[13.0] * 3]
    assert set(calls) == {(4, 3), (1, 3)}


@pytest.mark.usefixtures("shared_gpu")
def test_switching_tp_on_a_gpu_changes_no_token(tiny_model: TinyModel) -> None:
    with closing(make_switching_core(tiny_model("llama"), device="cuda", dp=2, collectives="gloo")) as core:
        requests, samples = wander(core, (1, 2), switches=20, seed=0)
    with closing(make_core(tiny_model("llama"), device="cuda")) as core:
        expected = run_core(core, requests)
    for (tokens, log_probs), (same, near) in zip(
        responses(samples, samples).values(), responses(samples, expected).values(), strict=True
    ):
        assert tokens == same
        np.testing.assert_allclose(log_probs, near, atol=1e-4)


def test_a_lone_rank_exchanges_over_nccl(tmp_path: Path) -> None:
    with closing(ProcessGroupCollective("nccl", 0, 1, tmp_path / "store", 60.0, CUDA)) as group:
        tensor = torch.arange(4.0, device=CUDA)
        group.all_reduce(tensor)
        assert group.all_gather(tensor).tolist() == [[0.0, 1.0, 2.0, 3.0]]


def test_a_cache_that_the_gpu_cannot_hold_is_refused_by_its_key(tiny_model: TinyModel) -> None:
    with pytest.raises(ConfigError, match=r"cuda has no 100000\.0 GiB for the KV cache; lower engine\.kv_cache_gib"):
        make_core(tiny_model("llama"), device="cuda", kv_cache_gib=1e5)
