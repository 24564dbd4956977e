"""Refuses connections that do not know the token. At most 32 may wait, and ZeroMQ takes in none of their messages.

    ZeroMQ ──a connection has come, is gone──▶ Porter ──too many strangers, or too long──▶ the first is hung up on
           ──name, password──────────────────▶        ──right or wrong───────────────────▶ let in, or hung up on
    server ──a connection has proved itself───────▶

A message of several frames may grow without a limit, so a stranger must not begin one. ZeroMQ keeps at most one frame,
of PIECE_BYTES, of a connection that was not let in.

The password is an HMAC under the token over a random name. It does not prove who sends it, since a listener on the way
can repeat it. That proof comes next; see `handshake`. A connection stays a stranger until then, for at most ten
seconds.

Waiting: the porter has a separate thread, which waits for no other: it answers while the server's loop is busy. If it
fails, the server ends.
"""

import hmac
import math
import os
import resource
import secrets
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import zmq

_MAX_STRANGERS = 32
"""The most connections that have not proved that they know the token; good clients do so within milliseconds."""
_HANDSHAKE_S = 10.0
"""Seconds after which a stranger's connection is ended."""
_AT_ONCE = 10_000
"""The most events that are taken in before connections are ended."""
_OTHER_DESCRIPTORS = 256
"""Descriptors that are no connections: files, threads, this process's own sockets."""
_END_LIMIT_S = 10.0
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
_EVENT = struct.Struct("=HI")
"""The layout of an event: its kind, and mostly the descriptor of the connection."""
_DOMAIN = b"tailrace"
_ZAP = "inproc://zeromq.zap.01"
"""The endpoint at which ZeroMQ asks, in each context."""


class Password(NamedTuple):
    """The credentials that a client sends before its first message."""

    name: bytes
    word: bytes

    @classmethod
    def of(cls, token: bytes) -> "Password":
        """Make a password for a client that knows the token."""
        name = secrets.token_hex(16).encode()
        return cls(name, _word(token, name))


def _word(token: bytes, name: bytes) -> bytes:
    return hmac.digest(token, b"door" + name, "sha256").hex().encode()


Ends = tuple[Any, Any] | None
"""The addresses of a connection's two ends; None if it is gone."""


class _Stranger(NamedTuple):
    came_at: float
    ends: Ends


class Porter:
    """Guards one socket of a server. Made before the socket listens; the only one in its context."""

    def __init__(
        self,
        context: "zmq.Context[Any]",
        server: zmq.SyncSocket,
        token: bytes,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """Start to guard. `on_failure`: called in the porter's thread when it fails, so that it lets nothing in."""
        self._token = token
        self._on_failure = on_failure
        self._server = server
        server.setsockopt(zmq.PLAIN_SERVER, 1)
        server.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        server.setsockopt(zmq.HANDSHAKE_IVL, math.ceil(_HANDSHAKE_S * 1000))
        self._asked = context.socket(zmq.REP)
        self._asked.bind(_ZAP)
        events = f"inproc://porter-{secrets.token_hex(8)}"
        server.monitor(events, _EVENTS)
        self._told = context.socket(zmq.PAIR)
        self._told.connect(events)
        self._open: set[int] = set()
        self._strangers: dict[int, _Stranger] = {}
        """The connections that are not known yet, in the order in which they came."""
        self._known: deque[int] = deque()
        """The connections that `know` was called for and that `_watch` has not taken in yet."""
        self._hanging_up = threading.Lock()
        """Held while connections are ended or become known: a known connection is not ended."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        few = max(limit - _OTHER_DESCRIPTORS, limit // 2)  # macOS may allow a process only 256
        self._most = sys.maxsize if limit == resource.RLIM_INFINITY else few
        self._thread = threading.Thread(target=self._run, name="porter", daemon=True)
        self._thread.start()

    def know(self, connection: int) -> None:
        """Record that this connection, a descriptor, has proved itself: it is no stranger. For the server's thread.

        Call this before the answer that welcomes the client. So no welcome comes from a connection that is being ended.
        """
        with self._hanging_up:
            self._known.append(connection)

    def close(self) -> None:
        """Stop guarding. Called before the server's socket is closed."""
        self._server.disable_monitor()  # the last event
        self._thread.join(_END_LIMIT_S)

    def _run(self) -> None:
        try:
            self._watch()
        except BaseException as error:  # after any failure the server must not go on
            self._on_failure(error)
            while self._next_event()[0] != zmq.EVENT_MONITOR_STOPPED:  # ZeroMQ waits for the reader of its events
                pass
            raise
        finally:
            self._asked.close(0)
            self._told.close(0)

    def _watch(self) -> None:
        poller = zmq.Poller()
        for waiting in (self._asked, self._told):
            poller.register(waiting, zmq.POLLIN)
        goes_on = True
        while goes_on:
            poller.poll(self._wait_ms())
            while self._asked.poll(0):
                self._answer()
            known = len(self._known)  # ZeroMQ has already reported the arrival of these
            for _ in range(_AT_ONCE):
                if not (goes_on and self._told.poll(0)):
                    break
                goes_on = self._take_in()
            for _ in range(known):
                self._strangers.pop(self._known.popleft(), None)
            self._send_away()

    def _wait_ms(self) -> int | None:
        """Milliseconds until the first stranger has been there for too long; None without strangers."""
        if not self._strangers:
            return None
        first = next(iter(self._strangers.values()))
        return max(0, math.ceil((first.came_at + _HANDSHAKE_S - time.monotonic()) * 1000))

    def _answer(self) -> None:
        version, request, _, _, _, _, name, word = self._asked.recv_multipart()  # the request of a PLAIN server
        right = hmac.compare_digest(word, _word(self._token, name))
        self._asked.send_multipart([version, request, b"200" if right else b"400", b"", name if right else b"", b""])

    def _take_in(self) -> bool:
        """Take in an event; return False after the last one."""
        event, descriptor = self._next_event()
        match event:
            case zmq.EVENT_ACCEPTED:
                self._open.add(descriptor)
                self._strangers.pop(descriptor, None)
                self._strangers[descriptor] = _Stranger(time.monotonic(), ends_of(descriptor))
            case zmq.EVENT_DISCONNECTED:
                self._open.discard(descriptor)
                self._strangers.pop(descriptor, None)
        return bool(event != zmq.EVENT_MONITOR_STOPPED)

    def _next_event(self) -> tuple[int, int]:
        """Wait for an event; return its kind and the descriptor of the connection."""
        event, descriptor = _EVENT.unpack_from(self._told.recv_multipart()[0])
        return event, descriptor

    def _send_away(self) -> None:
        """End the first strangers if too many wait or they wait too long, and the last ones if descriptors run out."""
        latest = time.monotonic() - _HANDSHAKE_S
        with self._hanging_up:
            strangers = [descriptor for descriptor in self._strangers if descriptor not in self._known]
            too_many = max(0, len(strangers) - _MAX_STRANGERS)
            late = sum(self._strangers[descriptor].came_at <= latest for descriptor in strangers)
            without_descriptors = max(0, len(self._open) - self._most)
            first, last = strangers[: max(too_many, late)], strangers[::-1][:without_descriptors]
            for descriptor in dict.fromkeys([*first, *last]):
                hang_up(descriptor, self._strangers.pop(descriptor).ends)


def hang_up(descriptor: int, ends: Ends) -> None:
    """End the connection between these ends, unless ZeroMQ has: the descriptor may belong to another one by now."""
    with suppress(OSError), _connection(descriptor) as connection:
        if (connection.getsockname(), connection.getpeername()) == ends:
            connection.shutdown(socket.SHUT_RDWR)


def ends_of(descriptor: int) -> Ends:
    """The addresses of a connection's ends; None if it is gone already."""
    try:
        with _connection(descriptor) as connection:
            return connection.getsockname(), connection.getpeername()
    except OSError:
        return None


@contextmanager
def _connection(descriptor: int) -> Iterator[socket.socket]:
    """The connection by another descriptor, since ZeroMQ closes its own.

    Raises:
        OSError: the descriptor is closed, or no socket's.
    """
    copy = os.dup(descriptor)
    try:
        connection = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with connection:
        yield connection
