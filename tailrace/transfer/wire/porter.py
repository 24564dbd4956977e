"""Refuses connections that do not know the token. At most 32 may wait, and ZeroMQ takes in no message of theirs.

    ZeroMQ ──a connection has come, is gone──▶ Porter ──too many strangers, or too long──▶ the first is hung up on
           ──name, password──────────────────▶        ──right or wrong───────────────────▶ let in, or hung up on
    server ──who is behind a connection has proved it──▶

A message of several frames may grow for as long as its sender likes, so a stranger must not begin one. ZeroMQ keeps at
most one frame, of PIECE_BYTES, of a connection that was not let in.

The password is an HMAC under the token over the name, which is a random one. It is no proof of who speaks, since
whoever listens on the way can say it again; that proof comes next, see `handshake`. A connection stays a stranger until
then, and for ten seconds at most.

A thread of its own, which waits on nobody else: it answers although the server's loop is busy. Should it fail, the
server ends.
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
"""Connections behind which nobody has proved who it is; good clients do within milliseconds."""
_HANDSHAKE_S = 10.0
"""After which a stranger is hung up on."""
_AT_ONCE = 10_000
"""Events taken in before somebody is hung up on."""
_OTHER_DESCRIPTORS = 256
"""That are no connections: files, threads, sockets of this process's own."""
_END_LIMIT_S = 10.0
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
_EVENT = struct.Struct("=HI")
"""What happened, and mostly the descriptor of the connection."""
_DOMAIN = b"tailrace"
_ZAP = "inproc://zeromq.zap.01"
"""Where ZeroMQ asks, in each context."""


class Password(NamedTuple):
    """What a client says of itself before its first message."""

    name: bytes
    word: bytes

    @classmethod
    def of(cls, token: bytes) -> "Password":
        """A new one, for a client that knows the token."""
        name = secrets.token_hex(16).encode()
        return cls(name, _word(token, name))


def _word(token: bytes, name: bytes) -> bytes:
    return hmac.digest(token, b"door" + name, "sha256").hex().encode()


Ends = tuple[Any, Any] | None
"""The addresses of a connection's two ends."""


class _Stranger(NamedTuple):
    came_at: float
    ends: Ends


class Porter:
    """For one socket of a server, before it listens. Alone in its context."""

    def __init__(
        self,
        context: "zmq.Context[Any]",
        server: zmq.SyncSocket,
        token: bytes,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`on_failure`: called in the porter's thread, which has ended: nobody new is let in."""
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
        """In the order in which they came."""
        self._known: deque[int] = deque()
        """By the server's thread."""
        self._hanging_up = threading.Lock()
        """So that who is known is not hung up on: before that, or not at all."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        few = max(limit - _OTHER_DESCRIPTORS, limit // 2)  # a process may have no more than macOS gives it, 256
        self._most = sys.maxsize if limit == resource.RLIM_INFINITY else few
        self._thread = threading.Thread(target=self._run, name="porter", daemon=True)
        self._thread.start()

    def know(self, connection: int) -> None:
        """Who is behind this connection, a descriptor, has proved it: it is no stranger. From the server's thread.

        Before the answer that welcomes the client, which therefore never comes from a connection that is hung up on.
        """
        with self._hanging_up:
            self._known.append(connection)

    def close(self) -> None:
        """Before the server's socket is closed."""
        self._server.disable_monitor()  # the last event
        self._thread.join(_END_LIMIT_S)

    def _run(self) -> None:
        try:
            self._watch()
        except BaseException as error:  # whatever it is, the server must not go on as if all were well
            self._on_failure(error)
            while self._next_event()[0] != zmq.EVENT_MONITOR_STOPPED:  # ZeroMQ waits for whoever it tells of events
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
            known = len(self._known)  # the arrival of these is among what ZeroMQ has told
            for _ in range(_AT_ONCE):
                if not (goes_on and self._told.poll(0)):
                    break
                goes_on = self._take_in()
            for _ in range(known):
                self._strangers.pop(self._known.popleft(), None)
            self._send_away()

    def _wait_ms(self) -> int | None:
        """Until the stranger who came first has been there for too long."""
        if not self._strangers:
            return None
        first = next(iter(self._strangers.values()))
        return max(0, math.ceil((first.came_at + _HANDSHAKE_S - time.monotonic()) * 1000))

    def _answer(self) -> None:
        version, request, _, _, _, _, name, word = self._asked.recv_multipart()  # as of a PLAIN server
        right = hmac.compare_digest(word, _word(self._token, name))
        self._asked.send_multipart([version, request, b"200" if right else b"400", b"", name if right else b"", b""])

    def _take_in(self) -> bool:
        """Take in what has happened; False once nothing will any more."""
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
        """What has happened, with the descriptor of the connection; waits for it."""
        event, descriptor = _EVENT.unpack_from(self._told.recv_multipart()[0])
        return event, descriptor

    def _send_away(self) -> None:
        """Hang up on the first where too many wait, or for too long; on the last where descriptors end."""
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
    """End the connection between these two, unless ZeroMQ has: the descriptor may be of somebody else by now."""
    with suppress(OSError), _connection(descriptor) as connection:
        if (connection.getsockname(), connection.getpeername()) == ends:
            connection.shutdown(socket.SHUT_RDWR)


def ends_of(descriptor: int) -> Ends:
    """None of a connection that is gone already."""
    try:
        with _connection(descriptor) as connection:
            return connection.getsockname(), connection.getpeername()
    except OSError:
        return None


@contextmanager
def _connection(descriptor: int) -> Iterator[socket.socket]:
    """It by another descriptor, since ZeroMQ closes its own.

    Raises:
        OSError: it is closed, or no socket.
    """
    copy = os.dup(descriptor)
    try:
        connection = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with connection:
        yield connection
