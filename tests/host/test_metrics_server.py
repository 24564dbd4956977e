"""A client that connects to the metrics port and says nothing holds up no other client for long."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry, Counter

from tailrace.host import metrics_server
from tailrace.host.metrics_server import MetricsServer

LIMIT_S = 20


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetricsServer]:
    monkeypatch.setattr(metrics_server._Handler, "timeout", 0.5)
    registry = CollectorRegistry()
    Counter("rows", "Of a test", registry=registry).inc()
    with closing(MetricsServer(registry, 0, setting="observe.metrics_port")) as made:
        yield made


def test_silent_connections_are_few_and_hung_up_on(server: MetricsServer) -> None:
    before = threading.active_count()
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT_S))
            for _ in range(50)
        ]
        assert silent[-1].recv(1) == b"", "there are too many, so it is not heard"
        assert threading.active_count() - before <= 16
        for connection in silent:
            assert connection.recv(1) == b""
    with urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=LIMIT_S) as answer:
        assert b"rows_total 1.0" in answer.read()


def test_scrapes_for_which_no_thread_can_be_started_take_no_place_of_others(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(metrics_server._MAX_SCRAPES + 1):
            with socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT_S) as connection:
                assert connection.recv(1) == b""
    with urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=LIMIT_S) as answer:
        assert answer.status == 200


@pytest.mark.parametrize(
    "line",
    [b"\x00\xff" * 50, b"GET /" + b"x" * 100_000, b"POST / HTTP/1.1\r\nContent-Length: 9999"],
    ids=["garbage", "a long line", "another method"],
)
def test_what_is_no_question_for_metrics_ends_nothing(
    server: MetricsServer, line: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT_S) as raw:
        raw.sendall(line + b"\r\n\r\n")
        raw.settimeout(LIMIT_S)
        while raw.recv(4096):
            pass
    with urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=LIMIT_S) as answer:
        assert answer.status == 200
    assert "Traceback" not in capsys.readouterr().err
