"""A judge on a real socket, which answers as a test says."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

Reply = tuple[int, bytes | dict[str, Any], dict[str, str]]
"""Status, body and headers; a mapping as the body is written as JSON."""


def said(text: str | None, *, prompt_tokens: int = 100, completion_tokens: int = 10) -> Reply:
    """The reply of an endpoint whose model says `text`."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": 0}
    return 200, {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}], "usage": usage}, {}


def failed(status: int, **headers: str) -> Reply:
    """The reply of an endpoint that fails."""
    return (
        status,
        {"error": {"message": f"status {status}"}},
        {name.replace("_", "-"): headers[name] for name in headers},
    )


class JudgeServer:
    """`with JudgeServer(reply) as judge:` serves at `judge.url`. `reply` is called with the body of each request, in a
    thread of its own; None drops the connection without an answer."""

    def __init__(self, reply: Callable[[dict[str, Any]], Reply | None]) -> None:
        self.asked: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        """Path, headers and body of each request."""
        self.most = 0
        """The most requests at a time."""
        self._now = 0
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                headers = {name.lower(): value for name, value in self.headers.items()}
                with server._lock:
                    server.asked.append((self.path, headers, body))
                    server._now += 1
                    server.most = max(server.most, server._now)
                try:
                    answer = reply(body)
                finally:
                    with server._lock:
                        server._now -= 1
                if answer is None:
                    self.close_connection = True
                    return
                status, content, more = answer
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                for name, value in {"content-length": str(len(data)), **more}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        class Server(ThreadingHTTPServer):
            request_queue_size = 128

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Say nothing of clients that have gone."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)
