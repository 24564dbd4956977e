"""Who may speak: both ends of a connection prove that they know the token, and neither says it.

    client ──Hello(name, nonce)──▶ server ──Challenge(nonce, proof)──▶ client ──Prove(proof)──▶ server ──Accepted──▶

Before that, ZeroMQ has let the connection in by its password (`porter`). A proof is an HMAC-SHA-256 under the token
over a word for the side, both nonces and the client's name. It holds for one connection: ZeroMQ gives every new one a
routing id of its own, and a server knows its peers by that.
"""

import hmac
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from tailrace.errors import WireError
from tailrace.transfer.wire.messages import NONCE_BYTES, PROTOCOL, Challenge, Hello, Prove
from tailrace.transfer.wire.porter import Password
from tailrace.transfer.wire.sockets import host_id

_MAX_CHALLENGED = 1024
"""Connections that have said Hello but not proved anything; the oldest is forgotten for one more."""


_EXPECTED = b"expected "
"""Begins what stands for the connection of a client that has none yet; ZeroMQ's names of connections begin with 0."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A connection as servers know it, also when ZeroMQ has made it anew."""

    name: str
    """For people; no other identity has the same `unique`."""
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
        """The answer to a challenge. `hint`: ends the error text, see `Protocol.address_hint`.

        Raises:
            WireError: the server does not know the token.
        """
        if not hmac.compare_digest(challenge.proof, proof_of_server(self.token, hello, challenge.nonce)):
            raise WireError(
                f"the server does not know the token that this client has: another one is there now; {hint}"
            )
        return Prove(proof_of_client(self.token, hello, challenge.nonce))


def name_of(unique: str) -> str:
    """The name, as far as it goes in there, of an identity."""
    return unique.rpartition("-")[0]


def check_token(token: bytes) -> None:
    """A token must not be one that can be guessed.

    Raises:
        WireError: it is shorter than 16 bytes.
    """
    if len(token) < 16:
        raise WireError(f"a token of {len(token)} bytes can be guessed; give 16 or more: secrets.token_bytes(32)")


def check_name(name: str) -> None:
    """A client's name must be text that can be sent.

    Raises:
        WireError: it is not.
    """
    try:
        str.encode(name)
    except (TypeError, UnicodeEncodeError):
        raise WireError(f"the name of a client is text, in valid Unicode; got {name!r:.80}") from None


def proof_of_server(token: bytes, hello: Hello, nonce: bytes) -> bytes:
    """What a server that knows the token says to `hello`, with a nonce of its own."""
    return _proof(token, b"server", hello, nonce)


def proof_of_client(token: bytes, hello: Hello, nonce: bytes) -> bytes:
    """What a client that knows the token says to the server's nonce."""
    return _proof(token, b"client", hello, nonce)


def _proof(token: bytes, side: bytes, hello: Hello, nonce: bytes) -> bytes:
    return hmac.digest(token, side + hello.nonce + nonce + hello.client.encode(), "sha256")


@dataclass(slots=True)
class _Known:
    client: str
    heard: float


class Authenticator:
    """A server's side: which connection belongs to which client. `now` never goes back, in seconds."""

    def __init__(self, token: bytes, *, silence_s: float) -> None:
        """`silence_s`: after that long without a word, a connection has to say Hello again."""
        check_token(token)
        self._token = token
        self._silence_s = silence_s
        self._challenged: OrderedDict[bytes, tuple[Hello, bytes]] = OrderedDict()
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        """By the time of their last word."""

    def client(self, connection: bytes, now: float) -> str | None:
        """Whose words these are; None for someone who has not proved anything."""
        known = self._known.get(connection)
        if known is None:
            return None
        known.heard = now
        self._known.move_to_end(connection)
        return known.client

    def challenge(self, connection: bytes, hello: Hello) -> Challenge:
        """The answer to Hello.

        Raises:
            WireError: it speaks another protocol.
        """
        if hello.protocol != PROTOCOL:
            raise WireError(f"client {hello.client!r} speaks protocol {hello.protocol}, this server {PROTOCOL}")
        known, nonce = self._challenged.get(connection, (None, b""))
        if known != hello:  # else it came twice, and the answer to the first may be on its way
            nonce = secrets.token_bytes(NONCE_BYTES)
            self._challenged[connection] = (hello, nonce)
        if len(self._challenged) > _MAX_CHALLENGED:
            self._challenged.popitem(last=False)
        return Challenge(nonce, proof_of_server(self._token, hello, nonce))

    def enter(self, connection: bytes, prove: Prove, now: float) -> str | None:
        """Let a connection in: the name of its client; None where it has not said Hello (or too long ago).

        Raises:
            WireError: its proof is wrong.
        """
        challenged = self._challenged.pop(connection, None)
        if challenged is None:
            return None
        hello, nonce = challenged
        if not hmac.compare_digest(prove.proof, proof_of_client(self._token, hello, nonce)):
            raise WireError(f"client {hello.client!r} does not know the token of this server; give both the same")
        self._known.pop(connection, None)  # the newest word comes last
        self._known[connection] = _Known(hello.client, now)
        return hello.client

    def expect(self, client: str, now: float) -> None:
        """A client from before this server was started: it counts as silent where it does not come in time."""
        self._known[_EXPECTED + client.encode()] = _Known(client, now)

    @property
    def next_deadline(self) -> float | None:
        """When the next connection has been silent for too long."""
        return next(iter(self._known.values())).heard + self._silence_s if self._known else None

    def silent(self, now: float, is_there: Callable[[bytes], bool]) -> set[str]:
        """Forget connections that were silent for too long; the clients that have no other.

        `is_there`: whether a connection still stands. One that does counts as heard: its client has nothing to say.
        """
        gone: set[str] = set()
        while (deadline := self.next_deadline) is not None and deadline <= now:
            connection, known = self._known.popitem(last=False)
            if is_there(connection):
                self._known[connection] = _Known(known.client, now)
            else:
                gone.add(known.client)
        return gone.difference(known.client for known in self._known.values()) if gone else gone
