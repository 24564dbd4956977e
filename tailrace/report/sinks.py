"""Sinks that hand a run's metrics to other tools: TensorBoard, Weights & Biases and Prometheus."""

import importlib
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event as TensorBoardEvent  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary  # type: ignore[import-untyped]
from tensorboard.compat.proto.tensor_pb2 import TensorProto  # type: ignore[import-untyped]
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto  # type: ignore[import-untyped]
from tensorboard.compat.proto.types_pb2 import DT_STRING  # type: ignore[import-untyped]
from tensorboard.plugins.text.metadata import create_summary_metadata  # type: ignore[import-untyped]
from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]

from tailrace.config.pipeline import ObserveConfig
from tailrace.errors import UserError, one_line
from tailrace.events import Event
from tailrace.host.metrics_server import check_port
from tailrace.registers import run_files
from tailrace.registers.events import EventKind
from tailrace.report.prometheus import SETTING, PrometheusSink
from tailrace.report.run_data import shown_step
from tailrace.report.sample_text import figures, grouped, reward_words, visible
from tailrace.report.samples import SampleRecord, samples_in
from tailrace.report.trace_sink import TraceSink

LENGTHS_TAG = "train/response_tokens"
_TEXT = create_summary_metadata(display_name="", description="")
_COLUMNS = (
    *("group", "sample", "reward", "parts", "advantage", "tokens", "weight_versions", "failure"),
    *("prompt", "response", "answer"),
)
"""Those of a table of samples in Weights & Biases; see `SampleRecord`."""


class ClosableSink(Protocol):
    """A sink that holds something open."""

    def __call__(self, event: Event) -> None:
        """Take one event; ignore an event that the sink does not show."""

    def close(self) -> None:
        """Write what is left, and release what is open."""


def check_sinks(observe: ObserveConfig) -> None:
    """Check before a run begins that its sinks can be opened.

    Raises:
        UserError: Weights & Biases is asked for and not installed, or the port of the metrics is not available.
    """
    if observe.metrics_port is not None:
        check_port(observe.metrics_port, setting=SETTING)
    if observe.wandb_project is not None:
        _wandb(observe.wandb_project)


def open_sinks(observe: ObserveConfig, run_dir: Path, config: Mapping[str, Any]) -> list[ClosableSink]:
    """Open the sinks that `observe` asks for. `config` is the resolved configuration, to be shown with the metrics.

    Raises:
        UserError: Weights & Biases is asked for, and is not installed or refuses to begin; or the port of the metrics
            is not available.
    """
    sinks: list[ClosableSink] = []
    if observe.wandb_project is not None:
        sinks.append(WandbSink(observe.wandb_project, run_dir, config))
    if observe.tensorboard:
        sinks.append(TensorBoardSink(run_dir / run_files.TENSORBOARD))
    if observe.trace:
        sinks.append(TraceSink(run_dir))
    if observe.metrics_port is not None:
        sinks.append(PrometheusSink(observe.metrics_port))
    return sinks


class TensorBoardSink:
    """A sink for TensorBoard: scalars of steps and evaluations by the steps done, histograms of response lengths, and
    texts.

    A resumed run adds a file. Where it repeats steps, TensorBoard shows the newest values.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # texts of samples are for the owner alone
        self._writer = EventFileWriter(str(directory))
        self._lengths = StepLengths()

    def __call__(self, event: Event) -> None:
        """Write a `step`, `evaluation` or `samples` event; remember the length of a `sample`."""
        self._lengths.add(event)
        if event.task == EventKind.SAMPLES:
            self._write_samples(samples_in(event))
        scalars = tagged_scalars(event)
        if (position := steps_done(event)) is None or not scalars:
            return
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        lengths = self._lengths.pop(position - 1) if event.task == EventKind.STEP else []
        if lengths:
            values.append(Summary.Value(tag=LENGTHS_TAG, histo=_histogram(lengths)))
        self._writer.add_event(TensorBoardEvent(wall_time=time.time(), step=position, summary=Summary(value=values)))
        self._writer.flush()

    def _write_samples(self, records: Sequence[SampleRecord]) -> None:
        value = Summary.Value(tag=_samples_tag(records), metadata=_TEXT, tensor=_text_tensor(markdown(records)))
        event = TensorBoardEvent(wall_time=time.time(), step=records[0].step, summary=Summary(value=[value]))
        self._writer.add_event(event)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class WandbSink:
    """A sink for Weights & Biases: the same metrics, with the steps done as their axis, and tables of samples."""

    def __init__(self, project: str, run_dir: Path, config: Mapping[str, Any]) -> None:
        """Begin a run in `project`.

        Raises:
            UserError: the package is not installed, or refuses to begin.
        """
        self._wandb = _wandb(project)
        try:
            self._run = self._wandb.init(project=project, name=run_dir.name, config=dict(config), dir=str(run_dir))
        except Exception as error:  # no login, no network, no such project: wandb raises many kinds
            raise UserError(
                f"observe.wandb_project {project!r} cannot be opened: {one_line(error)}; "
                f"set it to null, or WANDB_MODE=offline to send it later"
            ) from None
        self._run.define_metric("*", step_metric="step")

    def __call__(self, event: Event) -> None:
        """Log a `step` or `evaluation` event, and a `samples` event as a table."""
        if event.task == EventKind.SAMPLES:
            records = samples_in(event)
            table = self._wandb.Table(columns=list(_COLUMNS), data=[_cells(record) for record in records])
            self._run.log({"step": records[0].step, _samples_tag(records): table})
        scalars = tagged_scalars(event)
        if (position := steps_done(event)) is not None and scalars:
            self._run.log({"step": position, **scalars})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _wandb(project: str) -> ModuleType:
    try:
        return importlib.import_module("wandb")
    except ModuleNotFoundError:
        raise UserError(
            f"observe.wandb_project is {project!r}, which needs wandb; pip install wandb, or set it to null"
        ) from None


class StepLengths:
    """Response lengths of the steps that are not finished yet."""

    def __init__(self) -> None:
        self._of_step: dict[int, list[int]] = {}

    def add(self, event: Event) -> None:
        """Take a `sample` event. Another attempt at the run makes all samples again, so it forgets the earlier ones."""
        if event.task == EventKind.RUN:
            self._of_step.clear()
        elif event.task == EventKind.SAMPLE and event.step is not None and event.tokens is not None:
            self._of_step.setdefault(event.step, []).append(event.tokens)

    def pop(self, step: int) -> list[int]:
        """Return the lengths of `step`, which is finished."""
        return self._of_step.pop(step, [])


def steps_done(event: Event) -> int | None:
    """Return the place of an event on the axis; None for an event without a step."""
    return None if event.step is None else shown_step(event)


def tagged_scalars(event: Event) -> dict[str, float]:
    """Return the finite metrics of a `step` (as train/…, or with the prefix they have) or an `evaluation` (as
    eval/…)."""
    prefix = event.about.scalars
    if prefix is None:
        return {}
    return {
        name if prefix == "train" and "/" in name else f"{prefix}/{name}": value
        for name, value in event.metrics.items()
        if math.isfinite(value)
    }


def markdown(records: Iterable[SampleRecord]) -> str:
    """Return the best and the worst sample of each prompt as Markdown. Texts are code, so nothing in them is marked
    up."""
    parts = []
    for group in grouped(records):
        parts.append(f"**prompt {group.number}** · {_plain(group.words)}\n\n{_code(group.prompt)}")
        if group.answer is not None:
            parts.append(f"answer\n\n{_code(group.answer)}")
        for sample in dict.fromkeys((0, len(group.samples) - 1)):
            record = group.samples[sample]
            words = " · ".join([f"**{reward_words(record)}**", *map(_plain, figures(record))])
            failure = f"\n\nthe grader failed\n\n{_code(record.failure)}\n\nresponse" if record.failure else ""
            parts.append(f"{words}{failure}\n\n{_code(record.response)}")
    return "\n\n".join(parts)


def _samples_tag(records: Sequence[SampleRecord]) -> str:
    return "train/samples" if records[0].kind == "training" else "eval/samples"


def _cells(record: SampleRecord) -> list[str | float | None]:
    """Return a row of the table of samples: a text, or a number, for each of `_COLUMNS`."""
    oldest, newest = record.weight_versions
    parts = visible(", ".join(f"{name} {value:g}" for name, value in record.parts.items()))
    failure = None if record.failure is None else visible(record.failure)
    numbers = (record.group, record.sample, record.reward)
    versions = f"{oldest}" if oldest == newest else f"{oldest} to {newest}"
    texts = tuple(visible(text) for text in (record.prompt, record.response, record.answer or ""))
    return [*numbers, parts, record.advantage, record.tokens, versions, failure, *texts]


def _code(text: str) -> str:
    return "\n".join("    " + line for line in visible(text).split("\n"))


def _plain(words: str) -> str:
    """Escape Markdown: names of reward parts and of validation sets are the user's."""
    return re.sub(r"([\\`*_{}\[\]()#+.!<>&|~-])", r"\\\1", words)


def _text_tensor(text: str) -> TensorProto:
    return TensorProto(
        dtype=DT_STRING,
        string_val=[text.encode()],
        tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
    )


def _histogram(values: Sequence[int]) -> HistogramProto:
    data = np.asarray(values, dtype=np.float64)
    counts, edges = np.histogram(data, bins=min(30, len(values)))
    return HistogramProto(
        min=data.min(),
        max=data.max(),
        num=len(values),
        sum=data.sum(),
        sum_squares=np.square(data).sum(),
        bucket_limit=edges[1:],
        bucket=counts,
    )
