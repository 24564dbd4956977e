import math
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)

from tailrace.config.pipeline import ObserveConfig
from tailrace.errors import UserError
from tailrace.events import Event
from tailrace.report.samples import samples_event
from tailrace.report.sinks import LENGTHS_TAG, TensorBoardSink, WandbSink, open_sinks
from tests.helpers.sample_records import make_sample
from tests.report.synthetic import CONFIG, SyntheticRun


def written(directory: Path, events: Iterable[Event]) -> EventAccumulator:
    sink = TensorBoardSink(directory)
    for event in events:
        sink(event)
    sink.close()
    accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0, "histograms": 0})
    accumulator.Reload()
    return accumulator


def test_tensorboard_has_every_metric_of_every_step(tmp_path: Path) -> None:
    events = list(SyntheticRun(total_steps=5, samples=8).attempt(0, 5))
    read = written(tmp_path, events)
    steps = [event for event in events if event.task == "step"]
    for name in steps[0].metrics:
        scalars = read.Scalars(name if "/" in name else f"train/{name}")
        assert [scalar.step for scalar in scalars] == [1, 2, 3, 4, 5]
        assert [scalar.value for scalar in scalars] == pytest.approx([step.metrics[name] for step in steps], rel=1e-6)


def test_tensorboard_has_the_evaluations_by_steps_before_them(tmp_path: Path) -> None:
    read = written(tmp_path, SyntheticRun(total_steps=4, samples=8, evaluate_every=2).attempt(0, 4))
    assert [scalar.step for scalar in read.Scalars("eval/accuracy")] == [0, 2, 4]


def test_tensorboard_has_a_histogram_of_each_steps_lengths(tmp_path: Path) -> None:
    events = list(SyntheticRun(total_steps=2, samples=8).attempt(0, 2))
    lengths = [event.tokens or 0 for event in events if event.task == "sample" and event.step == 1]
    histogram = written(tmp_path, events).Histograms(LENGTHS_TAG)[1].histogram_value
    assert (histogram.num, histogram.sum) == (8, sum(lengths))
    assert (histogram.min, histogram.max, sum(histogram.bucket)) == (min(lengths), max(lengths), 8)


def test_a_step_that_is_made_again_has_the_lengths_of_that_attempt_alone(tmp_path: Path) -> None:
    events = list(SyntheticRun(total_steps=2, samples=8).attempt(0, 2))
    cut_short = [event for event in events if event.task in ("run", "sample")]
    [first, second] = written(tmp_path, [*cut_short, *events]).Histograms(LENGTHS_TAG)
    assert (first.histogram_value.num, second.histogram_value.num) == (8, 8)


def test_tensorboard_has_the_texts_of_each_step(tmp_path: Path) -> None:
    records = [make_sample(2, response="forty-two", reward=1.0), make_sample(2, sample=1, response="none")]
    read = written(tmp_path, [samples_event(records, actor="driver", time=1.0, step=1)])
    [text] = read.Tensors("train/samples")
    assert text.step == 2
    [shown] = text.tensor_proto.string_val
    assert b"**reward 1**" in shown
    assert b"\n    forty-two" in shown
    assert read.SummaryMetadata("train/samples").plugin_data.plugin_name == "text"


def test_unexpected_events_and_figures_are_passed_over(tmp_path: Path) -> None:
    events = [
        Event(task="surprise", actor="nobody", start=0, end=1, metrics={"x": 1.0}),
        Event(task="step", actor="driver", start=0, end=1, metrics={"reward": 1.0}),
        Event(task="step", actor="driver", start=0, end=1, step=3, metrics={"reward": 1.0, "loss": math.nan}),
    ]
    read = written(tmp_path, events)
    assert read.Tags()["scalars"] == ["train/reward"]
    assert [scalar.step for scalar in read.Scalars("train/reward")] == [4]


class FakeWandb(ModuleType):
    """A stand-in for wandb that records what would be sent."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.init_arguments: dict[str, Any] = {}
        self.axes: list[tuple[str, str]] = []
        self.logged: list[dict[str, Any]] = []
        self.finished = False

    def init(self, **arguments: Any) -> "FakeWandb":
        self.init_arguments = arguments
        return self

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.axes.append((name, step_metric))

    def log(self, figures: dict[str, Any]) -> None:
        self.logged.append(figures)

    def Table(self, *, columns: list[str], data: list[list[Any]]) -> list[dict[str, Any]]:
        return [dict(zip(columns, row, strict=True)) for row in data]

    def finish(self) -> None:
        self.finished = True


def test_wandb_gets_the_configuration_and_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    sink = WandbSink("sums", tmp_path, CONFIG)
    for event in SyntheticRun(total_steps=2, samples=4, evaluate_every=2).attempt(0, 2):
        sink(event)
    sink.close()
    assert fake.init_arguments == {"project": "sums", "name": tmp_path.name, "config": CONFIG, "dir": str(tmp_path)}
    assert [(figures["step"], "train/reward" in figures) for figures in fake.logged] == [
        (0, False),
        (1, True),
        (2, True),
        (2, False),
    ]
    assert fake.axes == [("*", "step")]
    assert fake.finished


def test_wandb_gets_a_table_of_each_steps_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    sink = WandbSink("sums", tmp_path, CONFIG)
    records = [make_sample(2, response="forty\x1b[2m", reward=1.0), make_sample(2, sample=1, response="none")]
    sink(samples_event(records, actor="driver", time=1.0, step=1))
    [logged] = fake.logged
    assert logged["step"] == 2
    assert [row["response"] for row in logged["train/samples"]] == ["forty␛[2m", "none"]
    assert [row["reward"] for row in logged["train/samples"]] == [1.0, records[1].reward]


def test_a_missing_wandb_is_a_user_error_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="pip install wandb"):
        open_sinks(ObserveConfig(wandb_project="sums"), tmp_path, {})
    assert not list(tmp_path.iterdir())


def test_a_wandb_that_refuses_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**arguments: Any) -> None:
        raise RuntimeError("api_key not configured\n(no-tty)")

    fake = FakeWandb()
    monkeypatch.setattr(fake, "init", refuse)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with pytest.raises(UserError, match=r"'sums' cannot be opened: api_key not configured \(no-tty\); set it to null"):
        open_sinks(ObserveConfig(wandb_project="sums"), tmp_path, {})


@pytest.mark.parametrize("wanted", [True, False])
def test_tensorboard_files_are_written_only_where_wanted(tmp_path: Path, wanted: bool) -> None:
    for sink in open_sinks(ObserveConfig(tensorboard=wanted), tmp_path, {}):
        sink.close()
    assert (tmp_path / "tensorboard").is_dir() is wanted
