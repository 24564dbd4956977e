"""Properties of an engine that are known before it is made."""

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from pydantic import TypeAdapter

from tailrace.config.engine import AdapterEngineConfig, EngineConfig, NativeEngineConfig, SamplingConfig
from tailrace.config.generate import ServeConfig
from tailrace.config.load import parse_as
from tailrace.engine.backends.base import Backend
from tailrace.engine.factory import make_backend
from tailrace.errors import ConfigError
from tailrace.planning.engine_size import PROCESS_BYTES
from tailrace.run.workers.rollout import rows_in_hand
from tests.engine.helpers import TinyModel
from tests.helpers.runs import small_run

TYPES = [schema.model_fields["type"].default for schema in get_args(get_args(EngineConfig)[0])]
MILLION = 1_000_000


def backend(type: str, **keys: Any) -> Backend:
    section = {"type": type, **({"path": "no.such.engine"} if type == "adapter" else {}), **keys}
    return make_backend(TypeAdapter[EngineConfig](EngineConfig).validate_python(section))


@pytest.mark.parametrize("name", TYPES)
def test_every_engine_of_a_recipe_has_a_backend_of_its_own(name: str) -> None:
    assert type(backend(name)).__module__ == f"tailrace.engine.backends.{name}"


def test_an_engine_of_which_nothing_is_known_has_the_context_of_the_model_and_no_size(tiny_model: TinyModel) -> None:
    unknown = make_backend(AdapterEngineConfig(path="no.such.engine"))
    assert unknown.context_length(tiny_model("llama")) == 512
    assert unknown.size is None
    assert unknown.capacity is None
    unknown.check_sampling(SamplingConfig(temperature=100.0))
    unknown.check_cache(tiny_model("llama"), longest_prompt=10**6, max_new_tokens=10**6)


@pytest.mark.parametrize(
    ("keys", "capacity", "copies", "weights"),
    [
        ({"type": "native", "max_batch_size": 8}, 8, 1, 2 * MILLION),
        ({"type": "native", "max_batch_size": 8, "dp": 3, "tp": 2}, 24, 3, 3 * 2 * MILLION),
        ({"type": "vllm", "max_batch_size": 8, "dtype": "float32"}, 8, 1, 4 * MILLION),
        ({"type": "hf"}, None, 1, 4 * MILLION),
        ({"type": "fake"}, None, 1, 0),
    ],
)
def test_an_engine_says_how_many_sequences_it_decodes_and_what_its_weights_take(
    keys: dict[str, Any], capacity: int | None, copies: int, weights: int
) -> None:
    engine = backend(**keys)
    size = engine.size
    assert size is not None
    assert engine.capacity == capacity
    assert size.slots * size.dp == (capacity or 1)
    assert (size.dp, size.held(MILLION).get("engine weights", 0)) == (copies, weights)


def test_each_rank_has_a_cache_and_several_have_processes() -> None:
    one, six = (backend("native", kv_cache_gib=1, dp=dp, tp=tp).size for dp, tp in ((1, 1), (3, 2)))
    assert one is not None
    assert six is not None
    assert one.held(MILLION).keys() == {"engine weights", "KV cache"}
    assert six.held(MILLION)["KV cache"] == 6 * 2**30
    assert six.held(MILLION)["worker processes"] == 6 * PROCESS_BYTES


@pytest.mark.parametrize("name", ["native", "vllm"])
def test_a_context_may_be_shorter_than_the_models_and_no_longer(name: str, tiny_model: TinyModel) -> None:
    assert backend(name, max_model_len=100).context_length(tiny_model("llama")) == 100
    with pytest.raises(ConfigError, match=r"engine\.max_model_len 513 exceeds the model's context of 512"):
        backend(name, max_model_len=513).context_length(tiny_model("llama"))


def test_settings_of_cuda_are_refused_on_a_cpu_alone(tiny_model: TinyModel) -> None:
    graphs = backend("native", cuda_graphs=True)
    graphs.check(tiny_model("llama"), device=torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"engine\.cuda_graphs"):
        graphs.check(tiny_model("llama"), device=torch.device("cpu"))


def test_a_rollout_worker_holds_what_its_engine_decodes_and_one_group_more() -> None:
    def rows(**engine: Any) -> int:
        return rows_in_hand(small_run(Path("run"), Path("model"), Path("prompts.jsonl"), engine=engine))

    assert rows(type="native", max_batch_size=6, dp=2) == 12 + 4
    assert rows(type="hf") == 8  # the rows of a training step: the hf engine names no number


def test_an_engine_in_bfloat16_computes_in_float32_where_a_cpu_is_slow_in_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.config.base.multiplies_bfloat16", lambda: False)
    dtypes = {}
    for name in ("native", "vllm", "hf", "fake"):
        run = small_run(Path("run"), Path("model"), Path("prompts.jsonl"), engine={"type": name})
        dtypes[name] = run.engine.computing_dtype
    assert dtypes == {"native": "float32", "vllm": "float32", "hf": "float32", "fake": None}
    assert NativeEngineConfig().computing_dtype == "bfloat16"


def test_a_list_as_a_type_is_refused_in_one_line_where_a_cpu_is_slow_in_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tailrace.config.base.multiplies_bfloat16", lambda: False)
    with pytest.raises(ConfigError, match=r"^serve\.yaml: engine\.type is .*; expected one of .*$"):
        parse_as(ServeConfig, {"engine": {"type": ["native"]}}, source="serve.yaml")
