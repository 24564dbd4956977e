"""Only who knows the token speaks, and nobody says it."""

from typing import Any

import msgspec
import pytest

from tailrace.errors import WireError
from tailrace.transfer.wire.handshake import Door, Identity, proof_of_server
from tailrace.transfer.wire.messages import PROTOCOL, Hello, Prove
from tests.transfer.wire.desk import TOKEN

OTHER = b"another token of some length"
HINT = "read the address from the connection file"


def enter(door: Door, route: bytes, identity: Identity, now: float = 0.0) -> str | None:
    hello = identity.hello()
    return door.enter(route, identity.prove(hello, door.challenge(route, hello), hint=HINT), now)


def gone(connection: bytes) -> bool:
    """No connection stands."""
    return False


def test_a_client_that_knows_the_token_is_known_by_its_connection_from_then_on() -> None:
    door, identity = Door(TOKEN, silence_s=9), Identity("rollout", TOKEN)
    assert door.client(b"1", 0.0) is None
    assert enter(door, b"1", identity) == identity.unique
    assert (door.client(b"1", 0.0), door.client(b"2", 0.0)) == (identity.unique, None)


def test_the_client_notices_a_server_that_does_not_know_the_token() -> None:
    with pytest.raises(WireError, match=r"the server does not know the token .*read the address .*connection file"):
        enter(Door(OTHER, silence_s=9), b"1", Identity("rollout", TOKEN))


def test_a_client_that_does_not_know_the_token_stays_out() -> None:
    door, wrong = Door(TOKEN, silence_s=9), Identity("rollout", OTHER)
    hello = wrong.hello()
    challenge = door.challenge(b"1", hello)
    forged = msgspec.structs.replace(challenge, proof=proof_of_server(OTHER, hello, challenge.nonce))
    with pytest.raises(WireError, match=r"'rollout-\w+' does not know the token"):
        door.enter(b"1", wrong.prove(hello, forged, hint=HINT), 0.0)
    assert door.client(b"1", 0.0) is None


def test_a_proof_opens_the_door_once_and_for_one_connection() -> None:
    door, identity = Door(TOKEN, silence_s=9), Identity("rollout", TOKEN)
    hello = identity.hello()
    prove = identity.prove(hello, door.challenge(b"1", hello), hint=HINT)
    assert door.enter(b"1", prove, 0.0) == identity.unique
    assert door.enter(b"1", prove, 0.0) is None
    door.challenge(b"2", hello)
    with pytest.raises(WireError, match="does not know the token"):
        door.enter(b"2", prove, 0.0)


def test_the_server_cannot_be_made_to_prove_a_client_to_itself() -> None:
    door, identity = Door(TOKEN, silence_s=9), Identity("rollout", TOKEN)
    hello = identity.hello()
    challenge = door.challenge(b"1", hello)
    mirrored = door.challenge(b"2", Hello(hello.client, hello.host, PROTOCOL, challenge.nonce))
    with pytest.raises(WireError, match="does not know the token"):
        door.enter(b"1", Prove(mirrored.proof), 0.0)


def test_another_protocol_is_refused() -> None:
    hello = msgspec.structs.replace(Identity("rollout", TOKEN).hello(), protocol=PROTOCOL + 1)
    with pytest.raises(WireError, match=f"speaks protocol {PROTOCOL + 1}, this server {PROTOCOL}"):
        Door(TOKEN, silence_s=9).challenge(b"1", hello)


def test_a_connection_that_is_silent_too_long_says_hello_again() -> None:
    door, identity, other = Door(TOKEN, silence_s=9), Identity("rollout", TOKEN), Identity("actor", TOKEN)
    enter(door, b"1", identity, 0.0)
    enter(door, b"2", other, 0.0)
    enter(door, b"3", other, 1.0)
    door.client(b"1", 5.0)
    assert door.next_deadline == 9.0
    assert door.silent(9.0, gone) == set(), "its other connection is there"
    assert door.silent(10.0, gone) == {other.unique}
    assert (door.client(b"2", 10.0), door.client(b"1", 10.0)) == (None, identity.unique)


def test_a_client_from_before_is_silent_where_it_does_not_come() -> None:
    door, identity = Door(TOKEN, silence_s=9), Identity("rollout", TOKEN)
    for client in (identity.unique, "dead"):
        door.expect(client, 0.0)
    enter(door, b"1", identity, 5.0)
    assert door.next_deadline == 9.0
    assert door.silent(9.0, gone) == {"dead"}
    assert door.silent(14.0, gone) == {identity.unique}


def test_a_silent_connection_that_stands_is_not_forgotten() -> None:
    door, identity = Door(TOKEN, silence_s=9), Identity("rollout", TOKEN)
    enter(door, b"1", identity, 0.0)
    assert door.silent(9.0, lambda connection: connection == b"1") == set()
    assert door.client(b"1", 17.0) == identity.unique
    assert door.silent(26.0, gone) == {identity.unique}


def test_guests_that_prove_nothing_take_bounded_room() -> None:
    door, identity = Door(TOKEN, silence_s=9), Identity("rollout", TOKEN)
    hello = identity.hello()
    first = identity.prove(hello, door.challenge(b"first", hello), hint=HINT)
    for guest in range(1024):
        door.challenge(guest.to_bytes(2, "big"), identity.hello())
    assert door.enter(b"first", first, 0.0) is None


def test_the_token_is_neither_short_nor_shown() -> None:
    with pytest.raises(WireError, match="3 bytes can be guessed"):
        Identity("rollout", b"abc")
    with pytest.raises(WireError, match="3 bytes can be guessed"):
        Door(b"abc", silence_s=9)
    assert "token" not in repr(Identity("rollout", TOKEN))


@pytest.mark.parametrize("name", ["\ud800", None, 5])
def test_a_name_is_text_that_can_be_sent(name: Any) -> None:
    with pytest.raises(WireError, match="the name of a client is text, in valid Unicode; got"):
        Identity(name, TOKEN)


def test_two_clients_of_one_name_are_two() -> None:
    assert Identity("rollout", TOKEN).unique != Identity("rollout", TOKEN).unique


def test_a_hello_that_comes_twice_has_one_challenge() -> None:
    door, identity = Door(TOKEN, silence_s=10.0), Identity("client", TOKEN)
    hello = identity.hello()
    challenge = door.challenge(b"connection", hello)
    assert door.challenge(b"connection", hello) == challenge
    assert door.enter(b"connection", identity.prove(hello, challenge, hint=HINT), 0.0) == identity.unique
