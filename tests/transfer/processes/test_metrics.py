"""The metrics of a queue that Prometheus reads."""

import socket
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tailrace.errors import UserError
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.processes import metrics
from tailrace.transfer.queue.processes.metrics import serving_metrics
from tests.transfer.processes.test_supervisor import queue


def scrape(port: int) -> dict[tuple[str, str], float]:
    """The value of each sample, by its name and its labels' values in the order of the labels' names."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {
        (sample.name, "/".join(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_scrape_counts_rows_by_task_and_state_and_bytes_by_unit(tmp_path: Path) -> None:
    with queue(tmp_path) as processes, serving_metrics(processes.address, 0) as port:
        samples = scrape(port)
    documented = (Path(__file__).parents[3] / "docs" / "transfer_queue.md").read_text()
    assert [name for name, _ in samples if f"`{name.removeprefix('tailrace_queue_')}`" not in documented] == []
    assert samples["tailrace_queue_up", ""] == 1
    assert samples["tailrace_queue_rows", ""] == 0
    states = {labels for name, labels in samples if name == "tailrace_queue_task_rows"}
    assert states == {f"{state}/{task}" for task in ("rollout", "sink") for state in ("waiting", "ready", "leased")}
    assert samples["tailrace_queue_task_consumed_rows_total", "sink"] == 0
    assert samples["tailrace_queue_unit_alive", "unit-0"] == 1
    assert samples["tailrace_queue_unit_max_bytes", "unit-0"] == 8 * 2**30


def test_a_queue_that_has_another_token_is_said_to_be_down(tmp_path: Path) -> None:
    with queue(tmp_path) as processes:
        known = processes.address
        stranger = QueueAddress(endpoints=known.endpoints, host=known.host, token=b"x" * 32)
        with serving_metrics(stranger, 0) as port:
            assert scrape(port) == {("tailrace_queue_up", ""): 0}


def test_a_port_that_is_taken_is_named_with_the_option() -> None:
    address = QueueAddress(endpoints=["ipc:///nowhere"], host="here", token=b"x" * 32)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = f"^--metrics-port {port} cannot be had on 127.0.0.1: Address already in use; give another port"
        with pytest.raises(UserError, match=message), serving_metrics(address, port):
            pass


def test_a_queue_that_does_not_answer_is_said_to_be_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_LIMIT_S", 0.2)
    with queue(tmp_path) as processes:
        address = processes.address
    with serving_metrics(address, 0) as port:
        assert scrape(port) == {("tailrace_queue_up", ""): 0}
