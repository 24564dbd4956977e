"""Answers the scrapes of Prometheus, from a thread; for runs and for queues that are served."""

import socket

from prometheus_client import CollectorRegistry, start_http_server

from tailrace.errors import UserError

HOST = "127.0.0.1"
"""Metrics are for this machine alone."""
_END_LIMIT_S = 5.0


class MetricsServer:
    """Serves the metrics of a registry at `http://127.0.0.1:<port>/metrics` until it is closed."""

    def __init__(self, registry: CollectorRegistry, port: int, *, setting: str) -> None:
        """`port`: 0 for one that is free. `setting`: who asks for it.

        Raises:
            UserError: the port cannot be had, such as one that is taken.
        """
        try:
            self._server, self._thread = start_http_server(port, addr=HOST, registry=registry)
        except OSError as error:
            raise _refusal(setting, port, error) from None
        self.port: int = self._server.server_port
        """Where it listens."""

    def close(self) -> None:
        """Free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_END_LIMIT_S)


def check_port(port: int, *, setting: str) -> None:
    """Whether metrics can have the port: better known before anything is started.

    Raises:
        UserError: they cannot.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server of the metrics does
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise _refusal(setting, port, error) from None


def _refusal(setting: str, port: int, error: OSError) -> UserError:
    return UserError(f"{setting} {port} cannot be had on {HOST}: {error.strerror}; give another port")
