"""Every engine keeps the contract of engines."""

import asyncio
import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

from tailrace.config.engine import FakeEngineConfig, HfEngineConfig, NativeEngineConfig, VllmEngineConfig
from tailrace.conformance.engine import LIMIT_S, EngineContract
from tailrace.conformance.requests import collect, make_request
from tailrace.conformance.tiny import make_tokenizer
from tailrace.engine.base import EngineArgs
from tailrace.engine.factory import make_engine
from tailrace.engine.kernels.build import VECTORS
from tailrace.host.cpu import cpu_flags
from tests.conftest import TinyModel


class OurContract(EngineContract):
    """The contract that Tailrace's own engines keep beyond that of all engines."""

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, tiny_model: TinyModel) -> Path:
        return tiny_model("llama", head_dim=32)  # vLLM's attention on a CPU supports no smaller heads

    async def test_making_an_engine_writes_nothing_to_the_terminal(
        self, executor: ThreadPoolExecutor, model_dir: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        logging.enable_progress_bar()  # type: ignore[no-untyped-call]
        capfd.readouterr()
        engine = make_engine(self.config, EngineArgs(model_dir=model_dir, device="cpu", executor=executor))
        async with asyncio.timeout(LIMIT_S):
            await collect(engine.submit([make_request(0)]))
            await engine.close()
        assert "".join(capfd.readouterr()) == ""


class TestNative(OurContract):
    config = NativeEngineConfig(dtype="float32", block_size=8, kv_cache_gib=0.01, prefill_tokens=300)


@pytest.mark.skipif(not cpu_flags() >= set(VECTORS), reason="this CPU has no AVX2")
class TestNativeInBfloat16(OurContract):
    config = NativeEngineConfig(kernels="cpu", kv_cache_gib=0.01)
    tolerance = 0.1
    outliers = 0.1


@pytest.mark.skipif(not cpu_flags() >= set(VECTORS), reason="this CPU has no AVX2")
class TestNativeInFloat32WithCpp(OurContract):
    config = NativeEngineConfig(dtype="float32", kernels="cpu", kv_cache_gib=0.01)


class TestNativeInBfloat16WithTorch(OurContract):
    """An engine with rounded logits. Some are equal at the edge of the top k, where all equal ones are kept."""

    config = NativeEngineConfig(kernels="torch", kv_cache_gib=0.01)
    tolerance = 0.1
    outliers = 0.2


class TestNativeWithTwoShards(OurContract):
    config = NativeEngineConfig(dtype="float32", tp=2, block_size=8, kv_cache_gib=0.01)


class TestNativeWithTwoReplicas(OurContract):
    config = NativeEngineConfig(dtype="float32", dp=2, block_size=8, kv_cache_gib=0.01)


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not in this environment; make test-vllm has one with it"
)
class TestVllm(OurContract):
    config = VllmEngineConfig(dtype="float32", kv_cache_gib=0.01, max_batch_size=8)
    highest_temperature = 2.0


class TestHf(OurContract):
    config = HfEngineConfig()
    whole_responses = True


class TestHfWithAnotherFamily(OurContract):
    """A family of models whose parameters have none of the names that the native engine knows."""

    config = HfEngineConfig()
    whole_responses = True

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        directory = tmp_path_factory.mktemp("gpt2")
        tokenizer = make_tokenizer()
        torch.manual_seed(0)
        end = tokenizer.eos_token_id
        config = GPT2Config(
            vocab_size=len(tokenizer), n_positions=512, n_embd=64, n_layer=2, n_head=4, initializer_range=0.2
        )
        config.bos_token_id = config.eos_token_id = config.pad_token_id = end
        GPT2LMHeadModel(config).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        return directory


class TestFake(OurContract):
    config = FakeEngineConfig()
    without_model = True
