"""The engine's contract finds engines that break it."""

from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tailrace.config.engine import AdapterEngineConfig, HfEngineConfig
from tailrace.conformance.engine import EngineContract
from tailrace.engine.backends.hf import HfCore
from tailrace.engine.base import Engine
from tailrace.engine.driver import DrivenEngine
from tailrace.engine.factory import make_engine
from tailrace.engine.one_by_one import End
from tailrace.engine.weights import Weights
from tailrace.types import Request, WeightVersion
from tests.conftest import TinyModel


class Tempered(HfCore):
    """Says log-probabilities at temperature 1."""

    def generate(self, request: Request, end: End) -> tuple[list[int], list[float]]:
        tokens, log_probs = super().generate(request, end)
        return tokens, [value * request.sampling.temperature for value in log_probs]


class Unseeded(HfCore):
    """Draws as it likes."""

    def generate(self, request: Request, end: End) -> tuple[list[int], list[float]]:
        object.__setattr__(request, "seed", self._steps)
        return super().generate(request, end)


class Deaf(HfCore):
    """Keeps the weights that it has."""

    def install(self, weights: Mapping[str, torch.Tensor]) -> None:
        return


class Trusting(HfCore):
    """Installs whatever comes, as it comes."""

    def load_weights(self, version: WeightVersion, tensors: Weights) -> None:
        for name, tensor in tensors:
            assert isinstance(tensor, torch.Tensor)
            self.install({name: tensor})
        self._version = version


class Timeless(HfCore):
    """Tells no version."""

    def load_weights(self, version: WeightVersion, tensors: Weights) -> None:
        super().load_weights(0, tensors)


Check = Callable[[EngineContract, Engine, PreTrainedModel], Awaitable[None]]
SAMPLING: Mapping[str, Any] = {"temperature": 0.6}
CASES: dict[type[HfCore], Check] = {
    Tempered: lambda c, engine, model: c.test_log_probs_are_of_the_distribution_that_was_sampled_from(
        engine, model, SAMPLING
    ),
    Unseeded: lambda c, engine, _: c.test_the_seed_decides_the_tokens(engine),
    Deaf: lambda c, engine, model: c.test_new_weights_make_the_tokens_that_follow(engine, model),
    Trusting: lambda c, engine, model: c.test_weights_that_break_off_leave_the_old_ones(engine, model),
    Timeless: lambda c, engine, model: c.test_tokens_carry_the_version_of_their_weights(engine, model),
}


def make(model_dir: Path, *, device: str, executor: Executor, core: str) -> Engine:
    """An engine around the core of that name."""
    cores = {broken.__name__: broken for broken in CASES}
    return DrivenEngine(cores[core](HfEngineConfig(), model_dir, device=torch.device(device)), executor)


@pytest.mark.parametrize("core", CASES, ids=lambda core: core.__name__)
async def test_an_engine_that_breaks_the_contract_is_found(
    core: type[HfCore], tiny_model: TinyModel, executor: Executor
) -> None:
    model_dir = tiny_model("llama")
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    config = AdapterEngineConfig(path=f"{__name__}.make", options={"core": core.__name__})
    engine = make_engine(config, model_dir, device="cpu", executor=executor)
    with pytest.raises(AssertionError):
        await CASES[core](EngineContract(), engine, model)
    await engine.close()
