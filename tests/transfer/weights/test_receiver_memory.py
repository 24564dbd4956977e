"""The memory of others that a receiver holds: released as soon as it is not needed, and not before."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tailrace.transfer.weights.messages import WEIGHTS
from tailrace.transfer.weights.receiver_memory import ReceiverMemory
from tailrace.transfer.weights.receiver_status import ReceiverStatus
from tailrace.transfer.weights.segments import Attachments, Pool, Segment
from tailrace.transfer.weights.threads import Guarded
from tailrace.transfer.weights.versions import Manifest, StoredVersion, encode_manifest, plan_payload
from tailrace.transfer.wire.server import Server
from tests.transfer.wire.desk import TOKEN


def manifest(serial: int) -> Manifest:
    return plan_payload(serial, serial, {"w": torch.zeros(64, dtype=torch.int8)}, dtype=None, chunk_bytes=64)


class Sides:
    """The memory of a receiver whose server does not run, and that of a sender."""

    def __init__(self, directory: Path) -> None:
        self.theirs = Pool(directory)
        self.server = Server("receiver", TOKEN, WEIGHTS, endpoints=["ipc://*"])
        self.pool = Pool(directory)
        self.attachments = Attachments()
        self.memory = ReceiverMemory(self.server, self.pool, Guarded(ReceiverStatus()))
        self.segments: dict[int, Segment] = {}

    def attach(self, serial: int) -> StoredVersion:
        """Attach a version in the sender's memory, which the receiver serves to others."""
        planned = manifest(serial)
        own = self.segments[serial] = self.theirs.take(planned.nbytes, serial, busy=list(self.segments.values()))
        segment = self.attachments.attach(own.path, serial, planned.nbytes)
        stored = StoredVersion(planned, encode_manifest(planned), segment)
        self.memory.give(stored)
        return stored

    def keep(self, serial: int) -> None:
        """Attach a version, and keep it as the newest whole one."""
        self.memory.keep(self.attach(serial))

    def take(self, serial: int) -> None:
        """Begin to find memory of the receiver's own for a version."""
        self.memory.take(manifest(serial), lambda outcome: None)

    def can_be_used_again(self, serial: int) -> bool:
        """Whether the receiver has released the sender's memory of this version. If so, the sender reuses it."""
        return self.segments[serial].renew(9)

    def close(self) -> None:
        self.memory.join()
        self.server._close()
        self.attachments.close()
        self.pool.close()
        self.theirs.close()


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[Sides]:
    made = Sides(tmp_path)
    yield made
    made.close()


def test_memory_of_others_is_let_go_of_when_room_of_its_own_is_taken(sides: Sides) -> None:
    sides.attach(1)
    sides.keep(2)
    with sides.memory.reading():
        sides.keep(3)
        coming = sides.attach(4)
        sides.take(4)
        free = {serial: sides.can_be_used_again(serial) for serial in sides.segments}
        assert free == {1: True, 2: False, 3: False, 4: False}, "read, the newest, and what is moved yet"
    moved = manifest(4)
    sides.memory.give(StoredVersion(moved, encode_manifest(moved), sides.pool.take(moved.nbytes, 4, busy=())))
    assert coming.segment.is_open
    assert sides.can_be_used_again(4), "it was moved"
    sides.memory.drop_unused()
    assert sides.can_be_used_again(2)


def test_memory_that_a_reader_leaves_just_before_room_is_taken_is_let_go_of(sides: Sides) -> None:
    """The end of the read also calls `drop_unused` in the receiver's thread, later than `take`."""
    sides.keep(1)
    with sides.memory.reading() as stored:
        assert stored is not None
        sides.keep(2)
        sides.memory.drop_unused()
        assert not sides.can_be_used_again(1)
    sides.take(3)
    assert sides.can_be_used_again(1)
    sides.memory.drop_unused()  # as the later call does
    assert sides.memory.chunk_server.serials == [2]


def test_what_was_let_go_of_once_is_not_let_go_of_again(sides: Sides) -> None:
    sides.attach(1)
    sides.keep(2)
    sides.take(3)
    sides.memory.drop_unused()
    assert sides.memory.chunk_server.serials == [2]


def test_a_version_that_is_given_up_is_let_go_of(sides: Sides) -> None:
    sides.attach(1)
    sides.memory.give_up(1)
    assert sides.can_be_used_again(1)
    assert sides.memory.chunk_server.serials == []


def test_two_that_read_one_version_keep_it_until_both_have_ended(sides: Sides) -> None:
    sides.keep(1)
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(sides.memory.reading())
        second.enter_context(sides.memory.reading())
        sides.keep(2)
        first.close()
        sides.take(3)
        assert not sides.can_be_used_again(1)
        second.close()
        sides.take(3)
        assert sides.can_be_used_again(1)
