"""Only clients that know the token are heard, and no message contains it."""

from typing import Any

import msgspec
import pytest

from tailrace.errors import WireError
from tailrace.transfer.wire.handshake import Authenticator, Identity, proof_of_server
from tailrace.transfer.wire.messages import PROTOCOL, Hello, Prove
from tests.transfer.wire.desk import TOKEN

OTHER = b"another token of some length"
HINT = "read the address from the connection file"


def enter(authenticator: Authenticator, route: bytes, identity: Identity, now: float = 0.0) -> str | None:
    hello = identity.hello()
    return authenticator.enter(route, identity.prove(hello, authenticator.challenge(route, hello), hint=HINT), now)


def gone(connection: bytes) -> bool:
    """Whether the connection stands: none does."""
    return False


def test_a_client_that_knows_the_token_is_known_by_its_connection_from_then_on() -> None:
    authenticator, identity = Authenticator(TOKEN, silence_s=9), Identity("rollout", TOKEN)
    assert authenticator.client(b"1", 0.0) is None
    assert enter(authenticator, b"1", identity) == identity.unique
    assert (authenticator.client(b"1", 0.0), authenticator.client(b"2", 0.0)) == (identity.unique, None)


def test_the_client_notices_a_server_that_does_not_know_the_token() -> None:
    with pytest.raises(WireError, match=r"the server does not know the token .*read the address .*connection file"):
        enter(Authenticator(OTHER, silence_s=9), b"1", Identity("rollout", TOKEN))


def test_a_client_that_does_not_know_the_token_stays_out() -> None:
    authenticator, wrong = Authenticator(TOKEN, silence_s=9), Identity("rollout", OTHER)
    hello = wrong.hello()
    challenge = authenticator.challenge(b"1", hello)
    forged = msgspec.structs.replace(challenge, proof=proof_of_server(OTHER, hello, challenge.nonce))
    with pytest.raises(WireError, match=r"'rollout-\w+' does not know the token"):
        authenticator.enter(b"1", wrong.prove(hello, forged, hint=HINT), 0.0)
    assert authenticator.client(b"1", 0.0) is None


def test_a_proof_opens_the_door_once_and_for_one_connection() -> None:
    authenticator, identity = Authenticator(TOKEN, silence_s=9), Identity("rollout", TOKEN)
    hello = identity.hello()
    prove = identity.prove(hello, authenticator.challenge(b"1", hello), hint=HINT)
    assert authenticator.enter(b"1", prove, 0.0) == identity.unique
    assert authenticator.enter(b"1", prove, 0.0) is None
    authenticator.challenge(b"2", hello)
    with pytest.raises(WireError, match="does not know the token"):
        authenticator.enter(b"2", prove, 0.0)


def test_the_server_cannot_be_made_to_prove_a_client_to_itself() -> None:
    authenticator, identity = Authenticator(TOKEN, silence_s=9), Identity("rollout", TOKEN)
    hello = identity.hello()
    challenge = authenticator.challenge(b"1", hello)
    mirrored = authenticator.challenge(b"2", Hello(hello.client, hello.host, PROTOCOL, challenge.nonce))
    with pytest.raises(WireError, match="does not know the token"):
        authenticator.enter(b"1", Prove(mirrored.proof), 0.0)


def test_another_protocol_is_refused() -> None:
    hello = msgspec.structs.replace(Identity("rollout", TOKEN).hello(), protocol=PROTOCOL + 1)
    with pytest.raises(WireError, match=f"speaks protocol {PROTOCOL + 1}, this server {PROTOCOL}"):
        Authenticator(TOKEN, silence_s=9).challenge(b"1", hello)


def test_a_connection_that_is_silent_too_long_says_hello_again() -> None:
    authenticator, identity, other = (
        Authenticator(TOKEN, silence_s=9),
        Identity("rollout", TOKEN),
        Identity("actor", TOKEN),
    )
    enter(authenticator, b"1", identity, 0.0)
    enter(authenticator, b"2", other, 0.0)
    enter(authenticator, b"3", other, 1.0)
    authenticator.client(b"1", 5.0)
    assert authenticator.next_deadline == 9.0
    assert authenticator.silent(9.0, gone) == set(), "its other connection is there"
    assert authenticator.silent(10.0, gone) == {other.unique}
    assert (authenticator.client(b"2", 10.0), authenticator.client(b"1", 10.0)) == (None, identity.unique)


def test_a_client_from_before_is_silent_where_it_does_not_come() -> None:
    authenticator, identity = Authenticator(TOKEN, silence_s=9), Identity("rollout", TOKEN)
    for client in (identity.unique, "dead"):
        authenticator.expect(client, 0.0)
    enter(authenticator, b"1", identity, 5.0)
    assert authenticator.next_deadline == 9.0
    assert authenticator.silent(9.0, gone) == {"dead"}
    assert authenticator.silent(14.0, gone) == {identity.unique}


def test_a_silent_connection_that_stands_is_not_forgotten() -> None:
    authenticator, identity = Authenticator(TOKEN, silence_s=9), Identity("rollout", TOKEN)
    enter(authenticator, b"1", identity, 0.0)
    assert authenticator.silent(9.0, lambda connection: connection == b"1") == set()
    assert authenticator.client(b"1", 17.0) == identity.unique
    assert authenticator.silent(26.0, gone) == {identity.unique}


def test_guests_that_prove_nothing_take_bounded_room() -> None:
    authenticator, identity = Authenticator(TOKEN, silence_s=9), Identity("rollout", TOKEN)
    hello = identity.hello()
    first = identity.prove(hello, authenticator.challenge(b"first", hello), hint=HINT)
    for guest in range(1024):
        authenticator.challenge(guest.to_bytes(2, "big"), identity.hello())
    assert authenticator.enter(b"first", first, 0.0) is None


def test_the_token_is_neither_short_nor_shown() -> None:
    with pytest.raises(WireError, match="3 bytes can be guessed"):
        Identity("rollout", b"abc")
    with pytest.raises(WireError, match="3 bytes can be guessed"):
        Authenticator(b"abc", silence_s=9)
    assert "token" not in repr(Identity("rollout", TOKEN))


@pytest.mark.parametrize("name", ["\ud800", None, 5])
def test_a_name_is_text_that_can_be_sent(name: Any) -> None:
    with pytest.raises(WireError, match="the name of a client is text, in valid Unicode; got"):
        Identity(name, TOKEN)


def test_two_clients_of_one_name_are_two() -> None:
    assert Identity("rollout", TOKEN).unique != Identity("rollout", TOKEN).unique


def test_a_hello_that_comes_twice_has_one_challenge() -> None:
    authenticator, identity = Authenticator(TOKEN, silence_s=10.0), Identity("client", TOKEN)
    hello = identity.hello()
    challenge = authenticator.challenge(b"connection", hello)
    assert authenticator.challenge(b"connection", hello) == challenge
    assert authenticator.enter(b"connection", identity.prove(hello, challenge, hint=HINT), 0.0) == identity.unique
