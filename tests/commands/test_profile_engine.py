"""The profile of an engine's steps: it counts the right steps, is complete, and is readable by people and machines."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tailrace.commands.profile_engine import profile_batches, profile_engine, table, title
from tailrace.config.generate import ProfileConfig
from tailrace.config.load import parse_as
from tailrace.engine.base import EngineStats
from tailrace.engine.profile import PARTS, Profiler
from tailrace.engine.scheduling.step import Chunk, StepInput
from tailrace.errors import ConfigError, UserError
from tailrace.types import Request, Sample
from tests.conftest import TinyModel


def configured(**changes: Any) -> ProfileConfig:
    values = {"threads": 1, "batch_sizes": [1, 3], "prompt_tokens": 10, "new_tokens": 5, **changes}
    return parse_as(ProfileConfig, values, source="test")


class ScriptedCore:
    """A core that prefills two prompts in each step, 1 s long, then decodes: 2 s a step, plus 1 s a sequence."""

    def __init__(self) -> None:
        self.profiler: Profiler | None = None
        self.batches: list[list[Request]] = []
        self._waiting: list[Request] = []
        self._made: dict[int, int] = {}
        self._requests: dict[int, Request] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> None:
        if not self._requests:
            self.batches.append([])
        self.batches[-1].append(request)
        self._waiting.append(request)
        self._requests[request.request_id] = request

    def step(self) -> list[Sample]:
        chunks = [
            Chunk(len(self._requests[key].prompt_ids) + made - 1, [7], [0], None) for key, made in self._made.items()
        ]
        fresh, self._waiting = self._waiting[:2], self._waiting[2:]
        chunks += [Chunk(0, request.prompt_ids.tolist(), [0], None) for request in fresh]
        decodes = len(self._made)
        if self.profiler is not None:
            wall_s = 2.0 + decodes if decodes else 1.0
            ranks = {"attention": 0.25 * wall_s, "mlp": 0.5 * wall_s, "other": 0.125 * wall_s}
            self.profiler.add(StepInput([], chunks), ranks, schedule_s=0.0625 * wall_s, wall_s=wall_s)
        self._made = {key: made + 1 for key, made in self._made.items()} | {request.request_id: 1 for request in fresh}
        for key in [key for key, made in self._made.items() if made == self._requests[key].sampling.max_new_tokens]:
            del self._made[key], self._requests[key]
        return []

    def stats(self) -> EngineStats:
        raise NotImplementedError


def test_steps_that_prefill_are_no_decode_steps() -> None:
    one, three = profile_batches(ScriptedCore(), configured(), vocab=100)
    assert (one.batch_size, one.decode_steps, one.median_step_s, one.mean_step_s) == (1, 4, 3.0, 3.0)
    assert (three.batch_size, three.decode_steps, three.median_step_s) == (3, 3, 5.0)
    assert three.tokens_per_s == pytest.approx(3 / 5)
    assert (one.prefill_tokens, one.prefill_tokens_per_s) == (10, 10.0)
    assert (three.prefill_tokens, three.prefill_tokens_per_s) == (20, 20.0)
    assert one.mean_context == pytest.approx((10 + 11 + 12 + 13) / 4)


def test_parts_add_up_to_the_step_and_stand_in_its_order() -> None:
    one, _ = profile_batches(ScriptedCore(), configured(), vocab=100)
    assert list(one.seconds) == ["schedule", "exchange", "attention", "mlp", "other"]
    assert one.seconds["exchange"] == pytest.approx(0.0625 * 3)
    assert sum(one.seconds.values()) == pytest.approx(one.mean_step_s)


def test_a_warm_up_of_the_largest_batch_is_not_reported_and_no_two_prompts_are_equal() -> None:
    core = ScriptedCore()
    profile_batches(core, configured(), vocab=100)
    assert [len(batch) for batch in core.batches] == [3, 1, 3]
    prompts = {tuple(request.prompt_ids.tolist()) for batch in core.batches for request in batch}
    assert len(prompts) == 7
    assert core.profiler is None


def test_the_table_has_a_column_for_each_batch_size_and_a_row_for_each_part() -> None:
    shown = StringIO()
    profiles = profile_batches(ScriptedCore(), configured(), vocab=100)
    Console(file=shown, width=100, highlight=False).print(table(profiles))
    rows = [line.split() for line in shown.getvalue().splitlines()]
    assert ["batch", "size", "1", "3"] in rows
    assert ["ms", "a", "decode", "step", "3000.00", "5000.00"] in rows
    assert ["mlp", "50.0", "%", "50.0", "%"] in rows
    assert ["prefill", "tokens/s", "10", "20"] in rows


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"engine": {"type": "hf"}}, "engine.type is 'hf': only steps of the native engine can be profiled"),
        ({"engine": {"type": "fake"}}, "engine.type is 'fake'"),
        ({"engine": {"type": "native", "dp": 2}}, "engine.dp is 2: a step belongs to one copy of the model"),
        ({"batch_sizes": [1, 256]}, "batch size 256 exceeds engine.max_batch_size 128; raise it"),
        ({"prompt_tokens": 500, "new_tokens": 20}, "exceed the context of 512 tokens together"),
        (
            {"engine": {"type": "native", "prefill_tokens": 6}},
            "3 prompts of 10 tokens are prefilled in 5 steps, so with new_tokens 5 they never decode together",
        ),
        (
            {"engine": {"type": "native", "dtype": "bfloat16", "kv_cache_gib": 0.00002}},
            "sequences of 15 tokens take 6; raise it",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(tiny_model: TinyModel, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        profile_engine(configured(model={"path": str(tiny_model("llama"))}, **changes), None)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "engine", [{"prefill_tokens": 8}, {"block_size": 16, "kv_cache_gib": 6.01 * 16 * 2 * 2 * 2 * 16 * 4 / 2**30}]
)
def test_what_is_just_allowed_is_measured(tiny_model: TinyModel, tmp_path: Path, engine: dict[str, Any]) -> None:
    changes = {"type": "native", "dtype": "float32", "kv_cache_gib": 0.01, **engine}
    profile_engine(configured(model={"path": str(tiny_model("llama"))}, engine=changes), tmp_path / "p.json")
    batches = json.loads((tmp_path / "p.json").read_text())["batches"]
    assert min(batch["decode_steps"] for batch in batches) >= 1


@pytest.mark.parametrize("change", [{"batch_sizes": []}, {"batch_sizes": 4}, {"new_tokens": 1}, {"batch_sizes": [0]}])
def test_a_profile_of_nothing_is_no_configuration(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))) as caught:
        configured(**change)
    assert "tuple" not in str(caught.value).lower()


def test_a_file_without_a_directory_is_refused_first(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere is not a directory"):
        profile_engine(configured(), tmp_path / "nowhere" / "p.json")


def test_an_existing_file_is_refused_first_and_replaced_when_asked(tmp_path: Path, tiny_model: TinyModel) -> None:
    path = tmp_path / "p.json"
    path.write_text("precious")
    with pytest.raises(UserError, match=r"--json .*p\.json exists; give another file, or replace it with --force"):
        profile_engine(configured(), path)
    assert path.read_text() == "precious"
    engine = {"type": "native", "dtype": "float32", "kv_cache_gib": 0.01}
    profile_engine(configured(model={"path": str(tiny_model("llama"))}, engine=engine), path, force=True)
    assert json.loads(path.read_text())["profile"] == "engine"
    assert [file.name for file in tmp_path.iterdir()] == ["p.json"]


def test_the_title_names_the_decoder_and_why_it_is_the_slow_one() -> None:
    assert title(configured(), None).endswith(" · C++ decoder")
    assert title(configured(), "no compiler").endswith(" · PyTorch decoder (no compiler)")


@pytest.mark.parametrize("engine", [{"dtype": "float32"}, {"dtype": "float32", "tp": 2}], ids=["one rank", "two ranks"])
def test_the_native_engine_measures_every_part(
    tmp_path: Path, tiny_model: TinyModel, capsys: pytest.CaptureFixture[str], engine: dict[str, Any]
) -> None:
    changes = {
        "model": {"path": str(tiny_model("llama"))},
        "engine": {"type": "native", "kv_cache_gib": 0.01, "block_size": 8, **engine},
    }
    profile_engine(configured(**changes), tmp_path / "p.json")
    document = json.loads((tmp_path / "p.json").read_text())
    assert document["profile"] == "engine"
    assert document["config"]["engine"]["dtype"] == "float32"
    assert document["kernels"] == "torch"
    assert document["why_torch"] == "the C++ decoder needs a block_size that is a multiple of 16, not 8"
    assert [(batch["batch_size"], batch["decode_steps"]) for batch in document["batches"]] == [(1, 4), (3, 4)]
    assert [batch["prefill_tokens"] for batch in document["batches"]] == [10, 30]
    for batch in document["batches"]:
        assert set(batch["seconds"]) >= set(PARTS) - {"other"}
        assert min(batch["seconds"].values()) >= 0
        assert sum(batch["seconds"].values()) == pytest.approx(batch["mean_step_s"])
    assert "ms a decode step" in capsys.readouterr().out
