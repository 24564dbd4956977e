"""The engine's contract finds engines that break it."""

from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tailrace.config.engine import AdapterEngineConfig, HfEngineConfig, NativeEngineConfig
from tailrace.conformance.engine import EngineContract
from tailrace.engine.backends.hf import HfCore
from tailrace.engine.base import Engine, EngineArgs
from tailrace.engine.core import EngineCore
from tailrace.engine.driver import DrivenEngine
from tailrace.engine.factory import make_engine
from tailrace.engine.model.weights import Weights
from tailrace.engine.one_by_one import End
from tailrace.types import Request, WeightVersion
from tests.conftest import TinyModel


class Tempered(HfCore):
    """An engine that reports log-probabilities at temperature 1."""

    def generate(self, request: Request, end: End) -> tuple[list[int], list[float]]:
        tokens, log_probs = super().generate(request, end)
        return tokens, [value * request.sampling.temperature for value in log_probs]


class Unseeded(HfCore):
    """An engine that ignores the seeds of requests."""

    def generate(self, request: Request, end: End) -> tuple[list[int], list[float]]:
        object.__setattr__(request, "seed", self._steps)
        return super().generate(request, end)


class Deaf(HfCore):
    """An engine that ignores new weights."""

    def install(self, weights: Mapping[str, torch.Tensor]) -> None:
        return


class Trusting(HfCore):
    """An engine that installs weights one by one as they come, without checks."""

    def load_weights(self, version: WeightVersion, tensors: Weights) -> None:
        for name, tensor in tensors:
            assert isinstance(tensor, torch.Tensor)
            self.install({name: tensor})
        self._version = version


class Timeless(HfCore):
    """An engine that reports no weight version."""

    def load_weights(self, version: WeightVersion, tensors: Weights) -> None:
        super().load_weights(0, tensors)


class Relabelling(EngineCore):
    """An engine that gives the new version to tokens it still makes with the old weights."""

    def load_weights(self, version: WeightVersion, tensors: Weights) -> None:
        if not self.has_work:
            super().load_weights(version, tensors)
        self.version = version


Check = Callable[[EngineContract, Engine, PreTrainedModel], Awaitable[None]]
SAMPLING: Mapping[str, Any] = {"temperature": 0.6}
CASES: dict[type[HfCore | EngineCore], Check] = {
    Tempered: lambda c, engine, model: c.test_log_probs_are_of_the_distribution_that_was_sampled_from(
        engine, model, SAMPLING
    ),
    Unseeded: lambda c, engine, _: c.test_the_seed_decides_the_tokens(engine),
    Deaf: lambda c, engine, model: c.test_new_weights_make_the_tokens_that_follow(engine, model),
    Trusting: lambda c, engine, model: c.test_weights_that_break_off_leave_the_old_ones(engine, model),
    Timeless: lambda c, engine, model: c.test_tokens_carry_the_version_of_their_weights(engine, model),
    Relabelling: lambda c, engine, model: c.test_an_update_in_mid_generation_makes_the_tokens_from_then_on(
        engine, model
    ),
}


def make(args: EngineArgs, *, core: str) -> Engine:
    """Make an engine around the broken core of that name."""
    broken: Any = next(broken for broken in CASES if broken.__name__ == core)
    config = HfEngineConfig() if issubclass(broken, HfCore) else NativeEngineConfig(dtype="float32", kv_cache_gib=0.01)
    return DrivenEngine(broken(config, args.model_dir, device=torch.device(args.device)), args.executor)


@pytest.mark.parametrize("core", CASES, ids=lambda core: core.__name__)
async def test_an_engine_that_breaks_the_contract_is_found(
    core: type[HfCore | EngineCore], tiny_model: TinyModel, executor: Executor
) -> None:
    model_dir = tiny_model("llama")
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    config = AdapterEngineConfig(path=f"{__name__}.make", options={"core": core.__name__})
    engine = make_engine(config, EngineArgs(model_dir=model_dir, device="cpu", executor=executor))
    with pytest.raises(AssertionError):
        await CASES[core](EngineContract(), engine, model)
    await engine.close()
