"""The handshake: both ends of a connection prove that they know the token, and neither sends it.

    client ──Hello(name, nonce)──▶ server ──Challenge(id, nonce, proof)──▶ client ──Prove(proof)──▶ server ──Accepted──▶

Before that, ZeroMQ has let the connection in by its password (`porter`). A proof is an HMAC-SHA-256 under the token
over a word for the side, both nonces and the client's name. It holds for one connection: ZeroMQ gives every new
connection a new routing id, and a server knows its peers by that.
"""

import hmac
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from tailrace.errors import WireError
from tailrace.transfer.wire.messages import NONCE_BYTES, PROTOCOL, Challenge, Hello, Prove
from tailrace.transfer.wire.porter import Password
from tailrace.transfer.wire.sockets import SERVER_ID_BYTES, host_id

_MAX_CHALLENGED = 1024
"""The most connections that have said Hello but not proved anything. One more replaces the oldest."""


_EXPECTED = b"expected "
"""Prefix of the stand-in for the connection of a client that has none yet. ZeroMQ's connection names begin with 0."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity by which servers know a client's connection, also after ZeroMQ has reconnected."""

    name: str
    """A name for people to read. No other identity has the same `unique`."""
    token: bytes = field(repr=False)
    unique: str = field(init=False)
    password: Password = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_token(self.token)
        check_name(self.name)
        object.__setattr__(self, "unique", f"{self.name[:100]}-{secrets.token_hex(8)}")
        object.__setattr__(self, "password", Password.of(self.token))

    def hello(self) -> Hello:
        """The first message of a connection."""
        return Hello(self.unique, host_id(), PROTOCOL, secrets.token_bytes(NONCE_BYTES))

    def prove(self, hello: Hello, challenge: Challenge, *, hint: str) -> Prove:
        """The answer to a challenge. `hint` ends the error text; see `Protocol.address_hint`.

        Raises:
            WireError: the server does not know the token.
        """
        if not hmac.compare_digest(challenge.proof, proof_of_server(self.token, hello, challenge.nonce)):
            raise WireError(
                f"the server does not know the token that this client has: another one is there now; {hint}"
            )
        return Prove(proof_of_client(self.token, hello, challenge.nonce))


def name_of(unique: str) -> str:
    """The name of an identity, as far as `unique` holds it."""
    return unique.rpartition("-")[0]


def check_token(token: bytes) -> None:
    """Check that a token cannot be guessed.

    Raises:
        WireError: it is shorter than 16 bytes.
    """
    if len(token) < 16:
        raise WireError(f"a token of {len(token)} bytes can be guessed; give 16 or more: secrets.token_bytes(32)")


def check_name(name: str) -> None:
    """Check that a client's name is text that can be sent.

    Raises:
        WireError: it is not.
    """
    try:
        str.encode(name)
    except (TypeError, UnicodeEncodeError):
        raise WireError(f"the name of a client is text, in valid Unicode; got {name!r:.80}") from None


def proof_of_server(token: bytes, hello: Hello, nonce: bytes) -> bytes:
    """The proof of a server that knows the token, in answer to `hello`; `nonce` is the server's own."""
    return _proof(token, b"server", hello, nonce)


def proof_of_client(token: bytes, hello: Hello, nonce: bytes) -> bytes:
    """The proof of a client that knows the token, in answer to the server's nonce."""
    return _proof(token, b"client", hello, nonce)


def _proof(token: bytes, side: bytes, hello: Hello, nonce: bytes) -> bytes:
    return hmac.digest(token, side + hello.nonce + nonce + hello.client.encode(), "sha256")


@dataclass(slots=True)
class _Known:
    client: str
    heard: float


class Authenticator:
    """A server's record of which connection belongs to which client. `now` is in seconds and never goes back."""

    def __init__(self, token: bytes, *, silence_s: float) -> None:
        """`silence_s`: seconds without a message after which a connection has to say Hello again."""
        check_token(token)
        self.server = secrets.token_hex(SERVER_ID_BYTES)
        """The server's id, which no other has: a server may listen where another one did. See `at_this_server`."""
        self._token = token
        self._silence_s = silence_s
        self._challenged: OrderedDict[bytes, tuple[Hello, bytes]] = OrderedDict()
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        """The known connections, in the order of their last messages."""

    def client(self, connection: bytes, now: float) -> str | None:
        """The client of a connection that has just sent a message; None if it has not proved anything."""
        known = self._known.get(connection)
        if known is None:
            return None
        known.heard = now
        self._known.move_to_end(connection)
        return known.client

    def challenge(self, connection: bytes, hello: Hello) -> Challenge:
        """The answer to Hello.

        Raises:
            WireError: the client speaks another protocol.
        """
        if hello.protocol != PROTOCOL:
            raise WireError(f"client {hello.client!r} speaks protocol {hello.protocol}, this server {PROTOCOL}")
        known, nonce = self._challenged.get(connection, (None, b""))
        if known != hello:  # else Hello came twice, and the first answer may be on its way
            nonce = secrets.token_bytes(NONCE_BYTES)
            self._challenged[connection] = (hello, nonce)
        if len(self._challenged) > _MAX_CHALLENGED:
            self._challenged.popitem(last=False)
        return Challenge(self.server, nonce, proof_of_server(self._token, hello, nonce))

    def enter(self, connection: bytes, prove: Prove, now: float) -> str | None:
        """Let a connection in; return its client, or None if it has not said Hello or did so too long ago.

        Raises:
            WireError: the proof is wrong.
        """
        challenged = self._challenged.pop(connection, None)
        if challenged is None:
            return None
        hello, nonce = challenged
        if not hmac.compare_digest(prove.proof, proof_of_client(self._token, hello, nonce)):
            raise WireError(f"client {hello.client!r} does not know the token of this server; give both the same")
        self._known.pop(connection, None)  # the connection with the newest message comes last
        self._known[connection] = _Known(hello.client, now)
        return hello.client

    def expect(self, client: str, now: float) -> None:
        """Expect a client of the server before this one: it counts as silent unless it comes in time."""
        self._known[_EXPECTED + client.encode()] = _Known(client, now)

    @property
    def next_deadline(self) -> float | None:
        """The time when the next connection will have been silent for too long."""
        return next(iter(self._known.values())).heard + self._silence_s if self._known else None

    def silent(self, now: float, is_there: Callable[[bytes], bool]) -> set[str]:
        """Forget connections that were silent for too long; return the clients that have no other connection.

        `is_there`: whether a connection still stands. If it does, it counts as heard: its client has nothing to say.
        """
        gone: set[str] = set()
        while (deadline := self.next_deadline) is not None and deadline <= now:
            connection, known = self._known.popitem(last=False)
            if is_there(connection):
                self._known[connection] = _Known(known.client, now)
            else:
                gone.add(known.client)
        return gone.difference(known.client for known in self._known.values()) if gone else gone
