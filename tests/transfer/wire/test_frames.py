"""Messages are received as they were sent, and bytes that are no message are refused."""

import tracemalloc
from contextlib import suppress
from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace import errors
from tailrace.config.columns import ColumnKind
from tailrace.errors import LeaseError, QueueError, TailraceError, WireError
from tailrace.transfer.queue import messages
from tailrace.transfer.queue.base import QueueStats, RowId, TaskStats
from tailrace.transfer.queue.messages import QUEUE, Answer, Claim, Request, Run, Table, Unit, pack, row_ids, unpack
from tailrace.transfer.queue.policies.base import CellFacts
from tailrace.transfer.queue.rows.state import ControlState, LostGroup, RowRecord
from tailrace.transfer.wire import frames as module
from tailrace.transfer.wire import messages as wire
from tailrace.transfer.wire.frames import (
    CUT,
    MAX_FRAME_BYTES,
    check_frames,
    decode_header,
    encode,
    joined,
)
from tailrace.transfer.wire.messages import Beat, Failure, Message, WireAnswer, WireRequest
from tailrace.types import TaskSpec
from tests.transfer.wire.rows import ints, packed

ROWS = packed([[1, 2], [3, 4]])
RUN = Run(2, ["prompt_ids"], packed([[5], [6]]))
BYTES = b"x" * 32
TASK = TaskStats(waiting=1, ready=2, leased=3, consumed=4, expired=5)
STATE = ControlState(
    generations=[1],
    next_lease=10,
    version=3,
    rows=[
        RowRecord(
            id=RowId(0, 1),
            group_id=4,
            group_size=1,
            order=7,
            consumed={0: 9},
            facts=CellFacts(lengths={"prompt_ids": 5}),
            units=(2,),
        )
    ],
    seen=[(0, 5)],
    lost=[LostGroup(group_id=3, group_size=2, left={7: [0]})],
    remade={},
    consumed=[1],
    expired=[0],
)
EXAMPLES: list[Message] = [
    wire.Hello("a-1", "host", 1, BYTES),
    wire.Prove(BYTES),
    messages.ReadTable(),
    Beat(1.0),
    wire.Cancel(3),
    messages.Admit(packed([[1, 1, 7]]), packed([-1]), [RUN], 3, 5.0),
    Claim("actor", 4, None, 5.0),
    messages.Ack(9, ROWS, packed([3, 4]), [RUN], [2]),
    messages.Nack(9, None),
    messages.Nack(9, ROWS),
    messages.Renew(9),
    messages.Remake(9, ROWS, 3),
    messages.Stats(),
    messages.Join("unit-0", "3f", False, ["tcp://h:1"], "host", "/dev/shm/x", 2**30),
    messages.Retire("unit-0"),
    messages.Written(9, ROWS),
    messages.Reserve(2**40),
    messages.Write(0, ROWS, [RUN], None),
    messages.Read(ROWS, ["prompt_ids"], packed([0, 9]), True),
    messages.Done([4], []),
    messages.Settle(packed([[1, 2, 3]]), ROWS),
    messages.Copy(packed([[1, 2, 0]]), messages.Unit(1, ["tcp://h:1"], "host", "")),
    messages.Inventory(),
    messages.Withdraw(ROWS, ROWS),
    messages.Advance(3),
    messages.Dismiss("rollout-0"),
    messages.Lost(5.0),
    messages.Close(),
    messages.Export(),
    messages.Release(7),
    messages.Restore(STATE),
    wire.Challenge("server", BYTES, BYTES),
    Table(
        [Unit(0, ["ipc:///a"], "host", "")],
        {"prompt_ids": ColumnKind.INTS},
        [TaskSpec(name="actor", reads=("prompt_ids",), writes=())],
    ),
    wire.Accepted(),
    wire.Waiting(),
    wire.Stranger(),
    Failure("LeaseError", "gone"),
    messages.Admitted(ROWS, [0, 1]),
    messages.Claimed(9, 60.0, packed([[1, 2, 3, 4]]), packed([[0, -1]]), 2, ["prompt_ids"], packed([[0]])),
    messages.Later(3),
    messages.Counted(QueueStats(rows=1, bytes=2, blocked_puts=0, tasks={"actor": TASK})),
    messages.Joined(2, {"prompt_ids": ColumnKind.INTS}),
    messages.Reserved(1, "0", 64),
    messages.Cells(packed([[5]]), packed([[[0, 0]]]), [], None),
    messages.Parts(packed([[1, 2, 3]])),
    messages.Withdrawn(True),
    messages.Groups(packed([4, 5])),
    messages.Exported(STATE, 7),
]


def test_there_is_an_example_of_every_message() -> None:
    assert {type(example) for example in EXAMPLES} == {*get_args(Request | Answer | WireRequest | WireAnswer)}


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(message: Message) -> None:
    [frame] = encode(7, 5, message)
    header = decode_header(frame)
    is_request = isinstance(message, get_args(Request | WireRequest))
    decode = QUEUE.decode_request if is_request else QUEUE.decode_answer
    assert (header.number, header.oldest, decode(header)) == (7, 5, message)


def read(frame: bytes) -> list[Message]:
    """The messages that a frame can be read as.

    Raises:
        WireError: its header cannot be read.
    """
    header = decode_header(frame)
    found: list[Message] = []
    for decode in (QUEUE.decode_request, QUEUE.decode_answer):
        with suppress(WireError):
            found.append(decode(header))
    return found


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_any_bytes_are_a_message_or_a_wire_error(frame: bytes) -> None:
    for start in (b"", b"\x93\x01\x00", b"\x93\x01\x00\x95\xa5Claim"):
        with suppress(WireError):
            assert len(read(start + frame)) <= 1


@given(st.sampled_from(EXAMPLES), st.data())
@settings(max_examples=300)
def test_a_damaged_message_is_a_message_or_a_wire_error(message: Message, data: st.DataObject) -> None:
    frame = bytearray(encode(7, 5, message)[0])
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    del frame[data.draw(st.integers(1, len(frame))) :]
    with suppress(WireError):
        assert len(read(bytes(frame))) <= 1


@pytest.mark.parametrize(
    "frame",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1
        b"\x93\x01\x00\xdd\xff\xff\xff\xff",
        b"\x93\x01\x00\xdb\xff\xff\xff\xff",  # a string
        b"\x93\x01\x00\x92\xa4Done\xdd\xff\xff\xff\xff\x01",
        b"\x93\x01\x00\x93\xa4Done\xdd\xff\xff\xff\xff",
        b"\x93\x01\x00\x92\xa5Prove\xc6\xff\xff\xff\xff",  # bytes
        b"\x93\x01\x00\x94\xa5Table\x90\xdf\xff\xff\xff\xff",  # a map
        b"\x93\x01\x00" + b"\x91" * 100_000,
        b"\x91" * 100_000,
    ],
)
def test_a_length_that_is_claimed_is_not_made_room_for(frame: bytes) -> None:
    tracemalloc.start()
    try:
        with suppress(WireError):
            assert read(frame) == []
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("wait_s", [float("nan"), float("inf"), -1.0])
def test_a_wait_without_an_end_is_refused(wait_s: float) -> None:
    with pytest.raises(WireError, match="not a request"):
        QUEUE.decode_request(decode_header(encode(1, 1, Claim("actor", None, None, wait_s))[0]))


def test_fields_that_a_message_does_not_have_are_refused() -> None:
    frame = msgspec.msgpack.encode((1, 1, ("ReadTable", 3)))
    with pytest.raises(WireError, match="not a request"):
        QUEUE.decode_request(decode_header(frame))


def test_packed_numbers_come_back_and_others_are_refused() -> None:
    np.testing.assert_array_equal(unpack(packed([[1, 2], [3, -4]]), 2), ints([[1, 2], [3, -4]]))
    assert row_ids(pack([RowId(1, 2), RowId(3, 4)])) == [RowId(1, 2), RowId(3, 4)]
    assert row_ids(b"") == []
    for data, width in ((b"1234567", 1), (packed([1, 2, 3]), 2), (b"", 0)):
        with pytest.raises(WireError, match="bytes are not rows"):
            unpack(data, width)


def test_lengths_have_the_shape_that_their_run_says() -> None:
    np.testing.assert_array_equal(RUN.table(), ints([[5], [6]]))
    assert Run(3, [], b"").table().shape == (3, 0)
    with pytest.raises(WireError, match="8 bytes are not the lengths of 2 rows in 1 columns"):
        Run(2, ["prompt_ids"], packed([5])).table()


def test_a_frame_beyond_the_limit_is_refused_before_it_is_sent() -> None:
    check_frames([b"small"])
    with pytest.raises(WireError, match="send fewer rows"):
        check_frames([np.empty(MAX_FRAME_BYTES // 8 + 1, dtype=np.int64).data])


SIZES = st.lists(st.integers(0, 40), max_size=5)


@given(SIZES, st.integers(0, 30))
def test_long_frames_are_cut_and_put_together_again(sizes: list[int], name: int) -> None:
    frames = [bytes([number]) * size for number, size in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_BYTES", 16)
        sent = list(map(bytes, encode(3, 2, Claim("x" * name, None, None, 0.0), frames)))
        assert max(map(len, sent[1:]), default=0) <= 16
        if sent[0].startswith(CUT):
            header, back = joined(sent[0], [memoryview(frame) for frame in sent[1:]])
        else:
            header, back = sent[0], [memoryview(frame) for frame in sent[1:]]
            assert len(sent) == 1 + len(sizes)
    assert QUEUE.decode_request(decode_header(header)) == Claim("x" * name, None, None, 0.0)
    assert list(map(bytes, back)) == frames


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 40), max_size=4), SIZES, st.booleans())
def test_pieces_that_are_not_those_that_were_announced_are_refused(
    lengths: list[int], sizes: list[int], torn: bool
) -> None:
    first = CUT + np.array(lengths, np.int64).tobytes() + b"x" * torn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_BYTES", 16)
        try:
            header, frames = joined(first, [memoryview(bytes(size)) for size in sizes])
        except WireError:
            return
    assert not torn
    assert [len(header), *map(len, frames)] == lengths
    assert sum(lengths) == sum(sizes)


KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TailraceError)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_raised_on_the_other_side_as_what_it_was(kind: type[TailraceError]) -> None:
    error = Failure.of(kind("the reason")).error()
    assert (type(error), str(error)) == (kind, "the reason")


def test_an_error_of_elsewhere_is_its_nearest_known_base() -> None:
    class OwnError(LeaseError):
        pass

    assert type(Failure.of(OwnError("x")).error()) is LeaseError


@pytest.mark.parametrize("kind", ["difflib", "nearest", "SystemExit", ""])
def test_a_failure_of_no_known_kind_is_a_wire_error(kind: str) -> None:
    error = Failure(kind, "boom").error()
    assert isinstance(error, QueueError)
    assert "boom" in str(error)
