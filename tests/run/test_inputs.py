"""Impossible settings are refused before an engine starts, and the start of an engine can be broken off."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tailrace.commands import generate
from tailrace.commands import profile_engine as profiling
from tailrace.config.engine import (
    AdaptiveTPConfig,
    FakeEngineConfig,
    HfEngineConfig,
    NativeEngineConfig,
    SamplingConfig,
)
from tailrace.config.generate import GenerateConfig, ProfileConfig
from tailrace.engine.backends.fake import FakeEngine, RandomPlaywright
from tailrace.engine.base import Engine, EngineArgs
from tailrace.engine.checks import check_context, check_engine, check_sampling
from tailrace.engine.decoder.factory import local_sizes
from tailrace.engine.factory import make_backend
from tailrace.engine.opening import open_engine
from tailrace.errors import ConfigError, ModelError, TailraceWarning
from tailrace.host.compute import prepare_torch
from tailrace.models.architecture import read_architecture
from tailrace.run import inputs
from tailrace.run.inputs import check_tokens
from tailrace.types import Prompt
from tests.conftest import TinyModel
from tests.helpers.runs import small_run, write_prompts


@pytest.mark.parametrize("device", ["cuda", "cuda:99", "mps", "xpu"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match=f"device '{device}' cannot be used here: "):
        prepare_torch(device, None)


def test_a_fake_engine_makes_tokens_of_the_model_alone(tiny_model: TinyModel) -> None:
    check_engine(FakeEngineConfig(vocab_size=261), tiny_model("llama"), device="cpu")
    with pytest.raises(ConfigError, match=r"engine\.vocab_size 262 is more than the 261 tokens of the model"):
        check_engine(FakeEngineConfig(vocab_size=262), tiny_model("llama"), device="cpu")


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tiny_model: TinyModel) -> None:
    prompt = Prompt(prompt_id="row 3", text="x", question="x", prompt_ids=np.array([5, 261]))
    with pytest.raises(ModelError, match=r"makes token 261 of row 3, and the model's are 0 … 260"):
        check_tokens([prompt], tiny_model("llama"))


@pytest.mark.parametrize("engine", [{"dp": 1000}, {"tp": 1000}, {"kv_cache_gib": 1e6}])
def test_an_engine_larger_than_the_memory_is_refused_with_both_figures(
    tiny_model: TinyModel, engine: dict[str, Any]
) -> None:
    figures = (
        r"the engine needs [\d.]+ GiB \(engine weights .* and [\d.]+ GiB are available; lower engine\.kv_cache_gib"
    )
    with pytest.raises(ConfigError, match=figures):
        check_engine(NativeEngineConfig(**engine), tiny_model("llama"), device="cpu")
    check_engine(NativeEngineConfig(**engine), tiny_model("llama"), device="cuda")  # a GPU has memory of its own


def test_only_the_machines_of_a_joined_cluster_know_their_memory(tmp_path: Path, tiny_model: TinyModel) -> None:
    def load(placement: str) -> None:
        inputs.load_inputs(
            small_run(
                tmp_path / "run",
                tiny_model("llama"),
                write_prompts(tmp_path / "p.jsonl"),
                engine=NativeEngineConfig(dp=1000),
                pipeline={"placement": placement},
                cluster={"address": "10.0.0.1:6379"},
            )
        )

    load("separated")
    with pytest.warns(TailraceWarning), pytest.raises(ConfigError, match="the engine needs"):
        load("colocated")


def test_every_command_refuses_such_an_engine(tmp_path: Path, tiny_model: TinyModel) -> None:
    engine, model = NativeEngineConfig(tp=1000), {"path": str(tiny_model("llama"))}
    run = small_run(tmp_path / "run", tiny_model("llama"), write_prompts(tmp_path / "p.jsonl"), engine=engine)
    with pytest.raises(ConfigError, match="the engine needs"):
        inputs.load_inputs(run)
    with pytest.raises(ConfigError, match="the engine needs"):
        generate.load_inputs(GenerateConfig.model_validate({"model": model, "engine": engine}), ["one"])
    with pytest.raises(ConfigError, match="the engine needs"):
        profiling.profile_engine(ProfileConfig.model_validate({"model": model, "engine": engine, "threads": 1}), None)


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({"cuda_graphs": True}, r"engine\.cuda_graphs is for CUDA devices, not for cpu; leave it out"),
        ({"collectives": "nccl"}, r"engine\.collectives=nccl is for CUDA devices, not for cpu; use auto"),
    ],
)
def test_what_only_cuda_has_is_refused_elsewhere(tiny_model: TinyModel, engine: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        check_engine(NativeEngineConfig(**engine), tiny_model("llama"), device="cpu")


@pytest.mark.parametrize(
    ("device", "ranks", "expected"),
    [("mps", 1, "device mps has no float64, by which the native engine"), ("xpu", 2, "device xpu takes one rank")],
)
def test_devices_that_the_native_engine_cannot_use_are_refused(
    tiny_model: TinyModel, device: str, ranks: int, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        make_backend(NativeEngineConfig(dp=ranks)).check(tiny_model("llama"), device=torch.device(device))


def test_a_cache_holds_the_longest_sequence_under_every_degree_that_the_engine_may_choose(
    tiny_model: TinyModel,
) -> None:
    stays = NativeEngineConfig(tp=2, kv_cache_gib=40e-6)
    changes = NativeEngineConfig(tp=2, kv_cache_gib=40e-6, adaptive_tp=AdaptiveTPConfig())
    rooms = [local_sizes(stays, read_architecture(tiny_model("llama")), tp)[1] * stays.block_size for tp in (1, 2)]
    assert rooms[0] < rooms[1]
    lengths = {"longest_prompt": rooms[0] // 2, "max_new_tokens": (rooms[0] + rooms[1]) // 2 - rooms[0] // 2}
    make_backend(stays).check_cache(tiny_model("llama"), **lengths)
    with pytest.raises(
        ConfigError,
        match=rf"holds {rooms[0]} tokens under TP 1, which engine\.adaptive_tp may choose.* or leave 1 out of",
    ):
        make_backend(changes).check_cache(tiny_model("llama"), **lengths)


def test_a_longer_context_than_the_models_is_refused(tiny_model: TinyModel) -> None:
    assert make_backend(NativeEngineConfig(max_model_len=100)).context_length(tiny_model("llama")) == 100
    with pytest.raises(ConfigError, match=r"engine\.max_model_len 513 exceeds the model's context of 512; lower it"):
        make_backend(NativeEngineConfig(max_model_len=513)).context_length(tiny_model("llama"))


def test_stop_tokens_that_the_model_does_not_have_are_refused(tiny_model: TinyModel) -> None:
    check_sampling(HfEngineConfig(), SamplingConfig(stop_token_ids=(260,)), tiny_model("llama"))
    with pytest.raises(ConfigError, match=r"stop_token_ids has 261, and the model's tokens are 0 … 260"):
        check_sampling(HfEngineConfig(), SamplingConfig(stop_token_ids=(3, 261)), tiny_model("llama"))


async def test_prompts_that_an_engine_has_no_room_for_are_refused(executor: ThreadPoolExecutor) -> None:
    engine = FakeEngine(executor=executor, playwright=RandomPlaywright(9))
    room = engine.max_model_len
    check_context(engine, longest_prompt=room - 1)
    with pytest.raises(ConfigError, match=rf"longest prompt has {room} tokens, and the engine has a context of {room}"):
        check_context(engine, longest_prompt=room)


async def test_cancelled_while_the_engine_starts_the_loop_stays_awake_until_it_is_closed(
    executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, started, may_end, closed = asyncio.get_running_loop(), asyncio.Event(), threading.Event(), []

    class Noting(FakeEngine):
        async def close(self) -> None:
            closed.append(self)
            await super().close()

    def make(config: object, args: EngineArgs) -> Engine:
        loop.call_soon_threadsafe(started.set)
        assert may_end.wait(60)
        return Noting(executor=args.executor, playwright=RandomPlaywright(9))

    monkeypatch.setattr("tailrace.engine.opening.make_engine", make)
    opening = asyncio.create_task(open_engine(FakeEngineConfig(), Path(), device="cpu", executor=executor))
    async with asyncio.timeout(60):
        await started.wait()
    opening.cancel()
    assert await asyncio.wait([opening], timeout=0.01) == (set(), {opening})  # the loop runs, so it hears signals
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert len(closed) == 1


async def test_an_engine_that_cannot_start_says_why(
    executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(config: object, args: EngineArgs) -> Engine:
        raise ModelError("no model")

    monkeypatch.setattr("tailrace.engine.opening.make_engine", make)
    with pytest.raises(ModelError, match="no model"):
        await open_engine(FakeEngineConfig(), Path(), device="cpu", executor=executor)
