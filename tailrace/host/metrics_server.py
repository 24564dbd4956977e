"""Answers the scrapes of Prometheus, in a thread, for runs and for served queues."""

import socket
import sys
import threading
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from tailrace.errors import UserError

HOST = "127.0.0.1"
"""The address of the server; only this machine reaches it."""
_END_LIMIT_S = 5.0
_MAX_SCRAPES = 16
"""The most concurrent scrapes; each takes a thread and a descriptor of the run."""
_SILENCE_LIMIT_S = 5.0
"""Seconds of silence after which a connected client is dropped."""


class _Handler(WSGIRequestHandler):
    timeout = _SILENCE_LIMIT_S

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, since it is not read."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._free = threading.Semaphore(_MAX_SCRAPES)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Process a request in a thread, or refuse it if there are too many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """See `ThreadingMixIn`."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print no traceback for a client that has gone."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class MetricsServer:
    """Serves the metrics of a registry at `http://127.0.0.1:<port>/metrics` until it is closed."""

    def __init__(self, registry: CollectorRegistry, port: int, *, setting: str) -> None:
        """`port`: 0 for any free port. `setting`: the setting that asks for the port.

        Raises:
            UserError: the port cannot be used, for example because it is taken.
        """
        try:
            self._server = make_server(HOST, port, make_wsgi_app(registry), _Server, _Handler)
        except OSError as error:
            raise _refusal(setting, port, error) from None
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        self.port: int = self._server.server_port
        """The port at which it listens."""

    def close(self) -> None:
        """Free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_END_LIMIT_S)


def check_port(port: int, *, setting: str) -> None:
    """Check that metrics can use the port, before anything is started.

    Raises:
        UserError: the port cannot be used.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server of the metrics does
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise _refusal(setting, port, error) from None


def _refusal(setting: str, port: int, error: OSError) -> UserError:
    return UserError(f"{setting} {port} cannot be had on {HOST}: {error.strerror}; give another port")
