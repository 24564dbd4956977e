"""The metrics of a run that Prometheus reads."""

import re
import socket
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from tailrace.config.pipeline import ObserveConfig
from tailrace.errors import UserError
from tailrace.events import Event
from tailrace.report.prometheus import PrometheusSink
from tailrace.report.sinks import check_sinks, open_sinks
from tests.report.synthetic import SyntheticRun, resumed_run
from tests.report.synthetic_workers import separated_run

Samples = dict[tuple[str, str], float]


def scrape(port: int) -> Samples:
    """The value of each sample, by its name and its labels' values in the order of the labels' names."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {
        (sample.name, "/".join(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scraped(events: Iterable[Event]) -> Samples:
    with closing(PrometheusSink(0)) as sink:
        for event in events:
            sink(event)
        return scrape(sink.port)


@pytest.fixture(scope="module")
def separated() -> Samples:
    evaluation = Event(task="evaluation", actor="driver", start=0, end=1, step=0, metrics={"reward": 0.5})
    use = [
        Event(task="breakdown", actor="driver", start=0, end=1, metrics={"update": 1.0, "update/forward": 1.0}),
        Event(task="memory", actor="driver", start=0, end=1, metrics={"weights": 1.0, "peak": 1.0}),
    ]
    return scraped([*separated_run(), evaluation, *use])


def test_the_page_has_every_metric_and_nothing_else(separated: Samples) -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| (`[^|]+`) \|", page[page.index("## Prometheus") :], re.MULTILINE)
    names = {name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum") for name, _ in separated}
    kept = {name.removeprefix("tailrace_") for name in names if not name.endswith("_created")}
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == kept


def test_steps_samples_and_tokens_are_counted(separated: Samples) -> None:
    assert separated["tailrace_total_steps", ""] == 12
    assert separated["tailrace_trained_steps", ""] == 12
    assert separated["tailrace_samples_total", ""] == 12 * 64
    assert separated["tailrace_tokens_total", ""] == 12 * 7200
    assert separated["tailrace_step_seconds", ""] == pytest.approx(7.9)


def test_the_figures_of_the_last_step_are_gauges(separated: Samples) -> None:
    last = [event for event in separated_run() if event.task == "step"][-1]
    shown = {labels: value for (name, labels), value in separated.items() if name == "tailrace_step_metric"}
    assert shown == {name: value for name, value in last.metrics.items() if not name.startswith("staleness/")}


def test_a_figure_that_the_last_step_lacks_is_not_shown() -> None:
    steps = [
        Event(task="step", actor="driver", start=0, end=1, step=0, metrics={"loss": 1.0, "reward": 0.5}),
        Event(task="step", actor="driver", start=1, end=2, step=1, metrics={"reward": 0.25}),
    ]
    samples = scraped(steps)
    assert samples["tailrace_step_metric", "reward"] == 0.25
    assert ("tailrace_step_metric", "loss") not in samples


def test_the_figures_of_the_last_evaluation_are_gauges() -> None:
    figures: tuple[dict[str, float], ...] = {"accuracy": 0.5, "reward/format": 0.1}, {"reward/format": 0.75}
    samples = scraped(Event(task="evaluation", actor="engine", start=0, end=1, step=0, metrics=of) for of in figures)
    assert samples["tailrace_evaluation_metric", "reward/format"] == 0.75
    assert ("tailrace_evaluation_metric", "accuracy") not in samples


def test_staleness_is_a_histogram_of_samples() -> None:
    counts = {"staleness/0": 5.0, "staleness/1": 2.0, "staleness/7": 1.0}
    samples = scraped([Event(task="step", actor="driver", start=0, end=1, step=0, metrics=counts)])
    buckets = {labels: value for (name, labels), value in samples.items() if name == "tailrace_staleness_bucket"}
    assert (buckets["0.0"], buckets["1.0"], buckets["6.0"], buckets["8.0"], buckets["+Inf"]) == (5, 7, 7, 8, 8)
    assert samples["tailrace_staleness_sum", ""] == 9


def test_the_time_of_each_worker_adds_up_by_state(separated: Samples) -> None:
    said = [event for event in separated_run() if event.task == "activity" and event.worker == "rollout-1"]
    for state in ("busy", "data", "weights", "idle"):
        expected = sum(event.metrics[state] for event in said)
        assert separated["tailrace_worker_seconds_total", f"{state}/rollout-1"] == pytest.approx(expected)


def test_the_time_of_each_worker_adds_up_by_phase_and_its_memory_is_the_newest() -> None:
    metrics = ({"generation": 2.0, "generation/decode": 1.5}, {"generation": 1.0, "idle": 0.5})
    told = [Event(task="breakdown", actor="engine", start=0, end=2, metrics=dict(each)) for each in metrics]
    sizes = [
        Event(task="memory", actor="driver", start=1, end=1, metrics={"weights": size, "peak": 9.0, "host": 8.0})
        for size in (5.0, 7.0)
    ]
    samples = scraped([*told, *sizes])
    of_time = "tailrace_worker_phase_seconds_total"
    phases = {labels: value for (name, labels), value in samples.items() if name == of_time}
    assert phases == {"generation/engine": 3.0, "idle/engine": 0.5}
    assert samples["tailrace_worker_part_seconds_total", "decode/generation/engine"] == 1.5
    of_memory = {labels: value for (name, labels), value in samples.items() if name == "tailrace_worker_memory_bytes"}
    assert of_memory == {"weights/driver": 7.0}
    assert samples["tailrace_worker_memory_peak_bytes", "driver"] == 9.0


def test_each_worker_has_its_weight_version_its_starts_and_its_deaths(separated: Samples) -> None:
    versions = {labels: value for (name, labels), value in separated.items() if name == "tailrace_weight_version"}
    assert versions == {"rollout-0": 12, "rollout-1": 12, "trainer": 12}
    assert separated["tailrace_worker_starts_total", "rollout-1"] == 2
    assert separated["tailrace_worker_deaths_total", "rollout-1"] == 1
    assert separated["tailrace_worker_deaths_total", "rollout-0"] == 0


def test_the_queue_is_shown_as_it_was_seen_last(separated: Samples) -> None:
    last = [event for event in separated_run() if event.task == "queue"][-1]
    assert separated["tailrace_queue_task_rows", "ready/actor"] == last.metrics["ready/actor"]
    assert separated["tailrace_queue_task_rows", "leased/rollout"] == last.metrics["leased/rollout"]
    assert separated["tailrace_queue_rows", ""] == last.metrics["rows"]
    assert separated["tailrace_queue_bytes", ""] == last.metrics["bytes"]


def queue_event(expired: float) -> Event:
    return Event(task="queue", actor="driver", start=0, end=0, metrics={"expired/rollout": expired, "lost_groups": 2.0})


def test_rows_that_went_back_are_counted_whatever_the_queue_had_counted_before(separated: Samples) -> None:
    """A run resumed from a checkpoint is included: its queue goes on with the counts of then."""
    assert separated["tailrace_queue_task_expired_rows_total", "rollout"] == 16
    samples = scraped(map(queue_event, (8, 8, 12, 20, 9, 10)))
    assert samples["tailrace_queue_task_expired_rows_total", "rollout"] == 4 + 8 + 1
    assert samples["tailrace_queue_lost_groups", ""] == 2


def test_how_often_the_run_went_on_from_a_checkpoint_is_counted(separated: Samples) -> None:
    assert separated["tailrace_resumes_total", ""] == 0
    assert scraped(resumed_run())["tailrace_resumes_total", ""] == 1


def test_a_colocated_run_shows_its_engine_as_a_worker() -> None:
    samples = scraped(SyntheticRun(total_steps=2, samples=4).attempt(0, 2))
    assert samples["tailrace_weight_version", "engine"] == 2
    assert samples["tailrace_trained_steps", ""] == 2


def test_unexpected_events_are_passed_over() -> None:
    odd = [
        Event(task="surprise", actor="nobody", start=0, end=1),
        Event(task="run", actor="driver", start=0, end=0, info={"total_steps": None}),
        Event(task="step", actor="driver", start=0, end=1),
        Event(task="update_weights", actor="engine", start=0, end=1),
        Event(task="activity", actor="trainer", start=0, end=1),
        Event(task="queue", actor="driver", start=0, end=1),
    ]
    assert scraped(odd)["tailrace_trained_steps", ""] == 1


def test_a_port_that_is_taken_is_found_before_the_run() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = f"^observe.metrics_port {port} cannot be had on 127.0.0.1: Address already in use; give another port"
        with pytest.raises(UserError, match=message):
            check_sinks(ObserveConfig(metrics_port=port))


def test_the_port_is_free_again_after_the_run(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    observe = ObserveConfig(metrics_port=port, tensorboard=False)
    check_sinks(observe)
    (sink,) = open_sinks(observe, tmp_path, {})
    assert scrape(port)["tailrace_trained_steps", ""] == 0
    sink.close()
    check_sinks(observe)


@pytest.mark.parametrize("port", [0, 65536])
def test_a_port_that_cannot_be_is_an_error_of_the_recipe(port: int) -> None:
    with pytest.raises(ValidationError, match="metrics_port"):
        ObserveConfig(metrics_port=port)
