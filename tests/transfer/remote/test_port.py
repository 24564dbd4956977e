"""Whatever comes to the port of a controller or a unit harms no other client.

Garbage of strangers is met with silence or an error. Each broken field of each client's message is met with an error or
an answer. No claimed length takes memory.
"""

import itertools
import random
import resource
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tailrace.errors import WireError
from tailrace.transfer.queue import messages as m
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.client.sync_queue import SyncQueue
from tailrace.transfer.queue.policies.base import CellFacts
from tailrace.transfer.queue.rows.state import ControlState, LostGroup, RowRecord
from tailrace.transfer.wire import messages as w
from tailrace.transfer.wire.frames import PIECE_BYTES, encode
from tailrace.transfer.wire.porter import Password
from tests.transfer.client.servers import LIMIT_S, TOKEN, Served, arena, serving
from tests.transfer.tables import group, outputs, tokens
from tests.transfer.wire.test_server import Peer

GROUPS = itertools.count(1)
NO_ROWS = m.pack([RowId(10**6, 3), RowId(10**6 + 1, 0)])
RUN = m.Run(2, ["prompt_ids"], m.pack(np.array([[2], [1]])))
STATE = ControlState(
    generations=[0],
    next_lease=2,
    version=0,
    rows=[
        RowRecord(
            id=RowId(0, 0),
            group_id=10**9,
            group_size=1,
            order=0,
            consumed={0: 1},
            facts=CellFacts(lengths={"prompt_ids": 1, "response_ids": 1}),
            units=(0,),
        )
    ],
    seen=[(10**9, 10**9 + 1)],
    lost=[LostGroup(group_id=10**9 + 5, group_size=1, left={0: [2]})],
    remade={},
    consumed=[0, 0, 0],
    expired=[0, 0, 0],
)
REQUESTS: list[Any] = [
    w.Hello("somebody", "somewhere", w.PROTOCOL, bytes(32)),
    w.Prove(bytes(32)),
    w.Beat(1.0),
    w.Cancel(3),
    m.Admit(m.pack(np.array([[10**6, 2, 1], [10**6, 2, 2]])), m.pack(np.array([-1, -1])), [RUN], 0, 0.0),
    m.Withdraw(NO_ROWS, m.pack(np.array([1, 2]))),
    m.Claim("actor", 1, None, 0.0),
    m.Ack(10**6, NO_ROWS, m.pack(np.array([-1, -1])), [RUN], [0]),
    m.Nack(10**6, NO_ROWS),
    m.Renew(10**6),
    m.Advance(0),
    m.Dismiss("nobody"),
    m.Lost(0.0),
    m.Release(10**6),
    m.Restore(STATE),
    m.Join("stray", "1", False, ["ipc:///nowhere/at/all"], "", "", 100),
    m.Written(0, NO_ROWS),
    m.Reserve(64),
    m.Write(0, NO_ROWS, [RUN], None),
    m.Write(7, NO_ROWS, [RUN], 10**6),
    m.Read(NO_ROWS, ["prompt_ids"], m.pack(np.array([0, 0])), True),
    m.Done([10**6], [10**6]),
    m.Settle(m.pack(np.array([[10**6, 0, 1]])), NO_ROWS),
    m.ReadTable(),
    m.Stats(),
    m.Export(),
    m.Inventory(),
]
NO_CHANGE = w.Cancel(0)
INT64 = 2**63
STRANGE: list[Any] = [
    *(None, True, -1, 0, 1, INT64 - 1, INT64, 2 * INT64 - 1, -INT64, 1.5, float("nan"), float("inf"), -1e300),
    *("", "x" * 300, "tcp://nowhere", b"", b"\xff" * 7, bytes(16), b"\xff" * 24, b"\x7f" * 48),
    *([], [[]], [-1, 2**40], ["", "\0"], {}, {"a": 1}, [None] * 40),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("queue"), make=arena, units=2) as running:
        yield running


@pytest.fixture(params=["controller", "unit"])
def endpoint(request: pytest.FixtureRequest, served: Served) -> str:
    return served.address.endpoints[-1] if request.param == "controller" else served.units[0]


@pytest.fixture(autouse=True)
def good_client(served: Served) -> Iterator[None]:
    """Assert after every test that a row passes through the whole queue."""
    with SyncQueue(served.address, name="good", limit_s=LIMIT_S) as queue:
        yield
        passes(queue)


def passes(queue: SyncQueue) -> None:
    number = next(GROUPS)
    queue.put(group(number, prompt=20_000), timeout=LIMIT_S)
    for task, cells in (("rollout", {"response_ids": tokens(3)}), ("reward", {"reward": 0.5}), ("actor", {})):
        claim = queue.claim(task, limit=1, timeout=LIMIT_S)
        assert [row.group_id for row in claim.rows] == [number]
        queue.ack(claim, outputs(claim, **cells))


def rss() -> int:
    """The peak memory of this process so far, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def port(endpoint: str) -> tuple[str, int]:
    host, _, number = endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(number)


OTHER = b"another token of some length"


def greeting(token: bytes = TOKEN) -> bytes:
    """The first bytes of a ZeroMQ client, up to where messages begin if the server knows the token."""
    name, word = Password.of(token)
    hello = b"\x05HELLO" + bytes([len(name)]) + name + bytes([len(word)]) + word
    initiate = b"\x08INITIATE\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    start = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"PLAIN".ljust(20, b"\0") + bytes(32)
    return start + b"".join(b"\x04" + bytes([len(command)]) + command for command in (hello, initiate))


def test_bytes_that_are_not_zeromq_are_dropped(endpoint: str) -> None:
    source = random.Random(0)
    for start in (b"", b"\xff" + bytes(8) + b"\x7f", b"GET / HTTP/1.1\r\n\r\n", greeting(), greeting()[:-3]):
        for _ in range(5):
            with socket.create_connection(port(endpoint), timeout=LIMIT_S) as raw:
                raw.sendall(start + source.randbytes(source.randrange(500)))


def test_a_frame_takes_no_memory_for_a_length_that_it_claims(endpoint: str) -> None:
    before = rss()
    with closing(socket.create_connection(port(endpoint), timeout=LIMIT_S)) as raw:
        raw.sendall(greeting() + b"\x02" + struct.pack(">Q", PIECE_BYTES) + b"some")
        with closing(socket.create_connection(port(endpoint), timeout=LIMIT_S)) as other:
            other.sendall(greeting() + b"\x02" + struct.pack(">Q", 2**62))
            while other.recv(4096):
                pass  # such a frame ends the connection
    assert rss() - before < 2**28


@contextmanager
def endless(endpoint: str, start: bytes) -> Iterator[socket.socket]:
    """A connection that begins a message of 512 MiB in many frames. They are sent or refused."""
    frames = (b"\x03" + struct.pack(">Q", 2**20) + bytes(2**20)) * 8
    with socket.create_connection(port(endpoint), timeout=LIMIT_S) as raw:
        with suppress(ConnectionError):
            raw.sendall(start)
            for _ in range(64):
                raw.sendall(frames)
        yield raw


NO_TOKEN = {
    "nothing": b"",
    "another token": greeting(OTHER),
    "no mechanism": greeting(OTHER).replace(b"PLAIN", b"NULL\0"),
    "half a handshake": greeting(OTHER)[:64],
}


@pytest.mark.parametrize("start", NO_TOKEN.values(), ids=NO_TOKEN)
def test_a_message_that_a_stranger_never_ends_takes_no_memory(endpoint: str, start: bytes) -> None:
    before = rss()
    with endless(endpoint, start) as raw, suppress(ConnectionError):
        while raw.recv(4096):
            pass  # the server closes the connection
    assert rss() - before < 2**26


def test_many_strangers_take_bounded_memory_and_keep_nobody_out(endpoint: str, served: Served) -> None:
    before = rss()
    half = greeting(OTHER)[:64] + b"\x06" + struct.pack(">Q", PIECE_BYTES) + bytes(PIECE_BYTES - 1000)
    with ExitStack() as stack:
        raws = []
        for _ in range(150):  # 600 MiB
            raws.append(stack.enter_context(socket.create_connection(port(endpoint), timeout=LIMIT_S)))
            with suppress(ConnectionError):
                raws[-1].sendall(half)
        for _ in range(300):
            raws.append(stack.enter_context(socket.create_connection(port(endpoint), timeout=LIMIT_S)))
        with SyncQueue(served.address, name="good, too", limit_s=LIMIT_S) as queue:
            passes(queue)
        assert sum(is_open(raw) for raw in raws) <= 32 + 1
    assert rss() - before < 2**28


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return True
    except ConnectionError:
        return False
    return False


@pytest.mark.parametrize("known", [False, True])
def test_numbers_in_msgpack_claim_no_memory(endpoint: str, known: bool) -> None:
    before = rss()
    with closing(Peer(endpoint)) as peer:
        if known:
            peer.enter()
        for claim in (
            b"\xdd\xff\xff\xff\xff",
            b"\xdf\xff\xff\xff\xff",
            b"\xc6\xff\xff\xff\xff",
            b"\xdb\xff\xff\xff\xff",
        ):
            for place in (b"", b"\x93\x09\x00", b"\x93\x09\x00\x95\xa5Write\x00", b"\x93\x09\x00" + b"\x91" * 2000):
                peer.send(place + claim)
        still_answers(peer, 10_000)
    assert rss() - before < 2**28


def still_answers(peer: Peer, number: int, question: w.Message = NO_CHANGE) -> list[w.Message]:
    """Ask a last question, which is accepted and changes nothing, and return the answers before that to it."""
    peer.send(*encode(number, 0, question))  # type: ignore[arg-type]
    answers = []
    while (answer := peer.answer())[0] != number:
        answers.append(answer[1])
    assert isinstance(answer[1], w.Accepted | w.Stranger)
    return answers


def test_garbage_of_strangers_is_met_with_silence(endpoint: str) -> None:
    source = random.Random(1)
    with closing(Peer(endpoint)) as peer:
        for _ in range(300):
            peer.send(*(source.randbytes(source.randrange(80)) for _ in range(source.randrange(1, 5))))
        assert not still_answers(peer, 10_000)


def test_strangers_are_asked_for_hello_and_those_without_the_token_are_refused(endpoint: str) -> None:
    with closing(Peer(endpoint)) as peer:
        for number, message in enumerate(REQUESTS[1:], start=1):
            assert peer.ask(number, message) == w.Stranger()
        challenge = peer.ask(100, REQUESTS[0])
        assert isinstance(challenge, w.Challenge)
        wrong = replace(peer.identity, token=b"another token of some length")
        with pytest.raises(WireError, match="does not know the token"):
            wrong.prove(REQUESTS[0], challenge, hint="")
        failure = peer.ask(101, w.Prove(bytes(32)))
        assert isinstance(failure, w.Failure)
        assert "does not know the token" in failure.text
        assert peer.ask(102, m.Stats()) == w.Stranger()


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the paths to all values inside."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield (key,)
        if isinstance(inner, list | dict):
            yield from ((key, *way) for way in places(inner))


def changed(value: Any, way: tuple[Any, ...], new: Any) -> Any:
    """A copy of `value` with `new` at one place."""
    if not way:
        return new
    copy = value.copy()
    copy[way[0]] = changed(value[way[0]], way[1:], new)
    return copy


def mutations(message: Any) -> Iterator[Any]:
    """Yield the message with each field, at any depth, replaced by something strange, cut off, or one too many."""
    plain = msgspec.to_builtins(message, builtin_types=(bytes,))
    yield plain
    yield plain[:-1]
    yield [*plain, 0]
    for way in places(plain):
        original = plain
        for key in way:
            original = original[key]
        if isinstance(original, bytes):
            yield from (changed(plain, way, original[:-8]), changed(plain, way, original * 2))
            yield changed(plain, way, b"\xff" * 7 + b"\x7f" + original[8:])
        if isinstance(original, list):
            yield from (changed(plain, way, original[:-1]), changed(plain, way, original * 2))
        yield from (changed(plain, way, strange) for strange in STRANGE)


@pytest.mark.parametrize("message", REQUESTS, ids=lambda message: type(message).__name__)
def test_every_field_of_every_message_of_a_client_that_is_broken(endpoint: str, message: Any) -> None:
    waits = type(message) in (m.Claim, m.Lost, m.Admit, m.Write)
    with closing(Peer(endpoint)) as peer:
        peer.enter()
        count = 0
        for count, broken in enumerate(mutations(message), start=1):
            frames = [bytes(24)] if isinstance(message, m.Write) and count % 2 else []
            peer.send(msgspec.msgpack.encode([10 + count, 10 + count, broken]), *frames)
        answers = still_answers(peer, 10 + count + 1)
        assert waits or len(answers) == count
        assert any(isinstance(answer, w.Failure) for answer in answers)
        peer.send(*encode(10 + count + 2, 0, w.Beat(0.0)))  # type: ignore[arg-type]
        still_answers(peer, 10 + count + 3)  # by now the peer counts as dead, and its claims went back


def test_one_row_is_not_asked_for_a_thousand_times(served: Served) -> None:
    with SyncQueue(served.address, name="good") as queue:
        queue.put(group(next(GROUPS), prompt=2**17))
        claim = queue.claim("rollout")
        [row] = claim.rows
        [unit] = row.units
        count = 1100
        with closing(Peer(served.units[unit])) as peer:
            peer.enter()
            read = m.Read(m.pack([row.id] * count), ["prompt_ids"], m.pack(np.zeros(count, np.int64)), False)
            failure = peer.ask(9, read)
        assert isinstance(failure, w.Failure)
        assert "name cells once" in failure.text
        queue.ack(claim, outputs(claim, response_ids=tokens(1)))
        for task, cells in (("reward", {"reward": 0.5}), ("actor", {})):
            claim = queue.claim(task, limit=1)
            queue.ack(claim, outputs(claim, **cells))


def test_a_put_of_no_rows_is_refused(served: Served) -> None:
    with closing(Peer(served.address.endpoints[-1])) as peer:
        peer.enter()
        failure = peer.ask(9, m.Admit(b"", b"", [], 0, 0.0))
    assert failure == w.Failure("QueueError", "got a put of no rows, expected one or more")


def test_states_that_contradict_themselves_are_not_taken_over(tmp_path: Path) -> None:
    number, admitted = 10, 0
    with serving(tmp_path) as served, closing(Peer(served.address.endpoints[-1])) as peer:
        peer.enter()
        for broken in mutations(m.Restore(STATE)):
            if isinstance(broken[-1], list) and broken[-1][3:4] == [[]]:
                continue  # a state without rows is taken over at once
            number += 2
            peer.send(msgspec.msgpack.encode([number, number, broken]))
            answer = peer.answer()[1]
            assert isinstance(answer, w.Failure | m.Admitted)
            admitted += isinstance(answer, m.Admitted)
            if isinstance(answer, m.Admitted):
                assert peer.ask(number + 1, m.Withdraw(answer.rows, b"")) == m.Withdrawn(True)
        assert 0 < admitted < number / 4
        with SyncQueue(served.address, name="good") as queue:
            passes(queue)


def test_outputs_of_a_task_that_has_not_consumed_the_row_contradict_the_state(tmp_path: Path) -> None:
    [row] = STATE.rows
    strange = msgspec.structs.replace(STATE, rows=[msgspec.structs.replace(row, consumed={})])
    with serving(tmp_path) as served, closing(Peer(served.address.endpoints[-1])) as peer:
        peer.enter()
        failure = peer.ask(9, m.Restore(strange))
    assert isinstance(failure, w.Failure)
    assert "contradicts itself" in failure.text
