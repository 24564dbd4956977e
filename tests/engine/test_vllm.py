"""Behaviour that is specific to vLLM; `test_conformance` tests the contract of every engine."""

import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tailrace.config.engine import VllmEngineConfig
from tailrace.conformance.requests import make_request, same_tokens
from tailrace.engine.backends.vllm import VllmCore
from tailrace.errors import EngineError, ModelError, RequestError
from tailrace.types import Request, Sample
from tests.engine.helpers import TinyModel

HAS_VLLM = importlib.util.find_spec("vllm") is not None
BLOCK = 128
"""The tokens in a block of vLLM on a CPU."""
BLOCK_GIB = BLOCK * 2 * 2 * 2 * 32 * 4 / 2**30
"""The GiB of a block of a tiny model in fp32."""

needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not in this environment; make test-vllm has one with it")


def make_core(model_dir: Path, *, device: str = "cpu", blocks: int = 6) -> VllmCore:
    """Make a core whose cache has `blocks` blocks. One of them is vLLM's own; the context takes four."""
    config = VllmEngineConfig(dtype="float32", kv_cache_gib=(blocks + 0.01) * BLOCK_GIB, max_batch_size=8)
    return VllmCore(config, model_dir, device=torch.device(device))


@pytest.fixture(scope="module")
def model_dir(tiny_model: TinyModel) -> Path:
    return tiny_model("llama", head_dim=32)


@pytest.fixture(scope="module")
def core(model_dir: Path) -> Iterator[VllmCore]:
    core = make_core(model_dir)
    yield core
    core.close()


def run(core: VllmCore, requests: Sequence[Request]) -> dict[int, Sample]:
    for request in requests:
        core.check(request)
        core.add(request)
    samples: list[Sample] = []
    while core.has_work:
        samples += core.step()
    return {sample.request_id: sample for sample in samples}


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is in this environment")
def test_without_vllm_the_error_says_what_to_install(model_dir: Path) -> None:
    with pytest.raises(ModelError, match=r"an environment of their own: make setup-vllm makes one.* pip install 'tail"):
        make_core(model_dir)


@needs_vllm
def test_a_start_leaves_the_environment_as_it_was_whatever_it_was(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "3")
    before = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    core = make_core(model_dir)
    assert {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")} == before
    assert len(run(core, [make_request(0)])) == 1
    core.close()


@needs_vllm
def test_after_a_start_that_failed_another_succeeds(model_dir: Path) -> None:
    with pytest.raises(
        ModelError, match=r"vLLM cannot run .* KV cache.* increasing engine\.kv_cache_gib .* engine\.max_model_len"
    ):
        make_core(model_dir, blocks=2)
    core = make_core(model_dir)
    assert len(run(core, [make_request(0)])) == 1
    core.close()


@needs_vllm
def test_a_group_computes_its_whole_blocks_once(core: VllmCore) -> None:
    before = core.stats()
    run(core, [make_request(i, group_id=0, prompt=2 * BLOCK + 5, max_new_tokens=2) for i in range(3)])
    after = core.stats()
    assert after.prefilled_tokens - before.prefilled_tokens == 2 * BLOCK + 3 * 5
    assert after.shared_tokens - before.shared_tokens == 2 * 2 * BLOCK
    assert (after.used_blocks, after.total_blocks) == (0, 5)


@needs_vllm
def test_a_request_that_waits_during_an_update_shares_no_block_of_older_weights(
    core: VllmCore, model_dir: Path
) -> None:
    begun, waiting = (
        make_request(i, group_id=0, prompt=2 * BLOCK + 5, max_new_tokens=9, ignore_eos=True) for i in range(2)
    )
    core.add(begun)
    core.step()
    before = core.stats()
    core.add(waiting)
    core.load_weights(before.version + 1, load_file(model_dir / "model.safetensors").items())
    samples: list[Sample] = []
    while core.has_work:
        samples += core.step()
    after = core.stats()
    assert after.shared_tokens == before.shared_tokens
    assert {sample.request_id: sample.weight_versions[0] for sample in samples} == {0: before.version, 1: after.version}


@needs_vllm
def test_preempted_requests_get_the_tokens_that_they_would_have_got(core: VllmCore) -> None:
    requests = [make_request(i, prompt=100, max_new_tokens=250, ignore_eos=True) for i in range(2)]
    alone = {i: sample for request in requests for i, sample in run(core, [request]).items()}
    before = core.stats().preemptions
    assert same_tokens(run(core, requests), alone)
    assert core.stats().preemptions > before


@needs_vllm
def test_the_larger_priority_starts_first(core: VllmCore) -> None:
    low, high = (make_request(i, prompt=300, max_new_tokens=3, ignore_eos=True) for i in range(2))
    high = Request(**{name: getattr(high, name) for name in high.__slots__} | {"priority": 0.5})
    assert list(run(core, [low, high])) == [1, 0]


@needs_vllm
@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"temperature": 0.005}, "temperature 0.005; vLLM takes 0.01 or more"),
        ({"temperature": 2.5}, "temperature 2.5; vLLM takes 2.0 at most"),
        ({"min_p": 0.1, "top_p": 0.9}, "min_p and top_p, which vLLM applies in the other order"),
    ],
)
def test_sampling_that_vllm_would_change_is_refused(core: VllmCore, sampling: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        core.check(make_request(0, **sampling))


@needs_vllm
def test_a_process_has_one_vllm_engine_at_a_time(core: VllmCore, model_dir: Path) -> None:
    with pytest.raises(EngineError, match="this process has a vLLM engine already; close it"):
        make_core(model_dir)
    assert len(run(core, [make_request(0)])) == 1


@needs_vllm
def test_a_device_that_vllm_was_not_built_for_is_refused(model_dir: Path) -> None:
    with pytest.raises(ModelError, match="the vLLM that is installed runs on cpu, not on cuda"):
        make_core(model_dir, device="cuda")
