"""Lets connections in that know the token, and keeps few others waiting: of these ZeroMQ takes in no message.

    ZeroMQ ──a connection has come, is gone──▶ Porter ──too many strangers──▶ the first is hung up on
           ──name, password──────────────────▶        ──right or wrong──────▶ let in, or hung up on
    server ──a connection has spoken─────────▶

A message of several frames may grow for as long as its sender likes, so a stranger must not begin one. What ZeroMQ
keeps of a connection that was not let in is one frame at the most, of PIECE_BYTES, for the time of a handshake.

The password is an HMAC under the token over the name, which is a random one. It is no proof of who speaks, since
whoever listens on the way can say it again; that proof comes next, see `handshake`.

A thread of its own, which waits on nobody else: it answers although the server's loop is busy.
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
from contextlib import suppress
from typing import Any, NamedTuple

import zmq

_MAX_STRANGERS = 32
"""Connections that have not spoken; those of good clients do within milliseconds."""
_HANDSHAKE_S = 10.0
"""After which ZeroMQ hangs up on a connection that was not let in."""
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


class Porter:
    """For one socket of a server, before it listens. Alone in its context."""

    def __init__(self, context: "zmq.Context[Any]", server: zmq.SyncSocket, token: bytes) -> None:
        self._token = token
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
        self._strangers: dict[int, float] = {}
        """When each of them came, in that order."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._spoken: deque[int] = deque()
        """Told by the server's thread."""
        self._most = sys.maxsize if limit == resource.RLIM_INFINITY else limit - _OTHER_DESCRIPTORS
        self._thread = threading.Thread(target=self._watch, name="porter", daemon=True)
        self._thread.start()

    def hear(self, connection: int) -> None:
        """This connection, a descriptor, has spoken: it is no stranger. From the server's thread."""
        self._spoken.append(connection)

    def close(self) -> None:
        """Before the server's socket is closed."""
        self._server.disable_monitor()  # the last event
        self._thread.join(_END_LIMIT_S)

    def _watch(self) -> None:
        poller = zmq.Poller()
        for waiting in (self._asked, self._told):
            poller.register(waiting, zmq.POLLIN)
        goes_on = True
        while goes_on:
            poller.poll()
            while self._asked.poll(0):
                self._answer()
            spoken = len(self._spoken)  # the arrival of these is among what ZeroMQ has told
            for _ in range(_AT_ONCE):
                if not (goes_on and self._told.poll(0)):
                    break
                goes_on = self._take_in()
            for _ in range(spoken):
                self._strangers.pop(self._spoken.popleft(), None)
            self._send_away()
        self._asked.close(0)
        self._told.close(0)

    def _answer(self) -> None:
        version, request, _, _, _, _, name, word = self._asked.recv_multipart()  # as of a PLAIN server
        right = hmac.compare_digest(word, _word(self._token, name))
        self._asked.send_multipart([version, request, b"200" if right else b"400", b"", name if right else b"", b""])

    def _take_in(self) -> bool:
        """Take in what has happened; False once nothing will any more."""
        event, descriptor = _EVENT.unpack_from(self._told.recv_multipart()[0])
        match event:
            case zmq.EVENT_ACCEPTED:
                self._open.add(descriptor)
                self._strangers.pop(descriptor, None)
                self._strangers[descriptor] = time.monotonic()
            case zmq.EVENT_DISCONNECTED:
                self._open.discard(descriptor)
                self._strangers.pop(descriptor, None)
        return bool(event != zmq.EVENT_MONITOR_STOPPED)

    def _send_away(self) -> None:
        """Hang up on the strangers that came first, where there are too many; on the newest, where descriptors end."""
        while self._strangers and next(iter(self._strangers.values())) < time.monotonic() - _HANDSHAKE_S:
            del self._strangers[next(iter(self._strangers))]  # ZeroMQ would have hung up: it was let in
        while len(self._strangers) > _MAX_STRANGERS:
            first = next(iter(self._strangers))
            del self._strangers[first]
            hang_up(first)
        for _ in range(min(len(self._open) - self._most, len(self._strangers))):
            hang_up(self._strangers.popitem()[0])


def hang_up(descriptor: int) -> None:
    """ZeroMQ closes the descriptor itself. It may just have done so, and another connection may have it by now: whoever
    is cut off so connects again.
    """
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.shutdown(socket.SHUT_RDWR)
