"""Memory of others in a receiver: let go of as soon as nobody needs it, and not before."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tailrace.transfer.weights.address import WeightsAddress
from tailrace.transfer.weights.messages import WEIGHTS
from tailrace.transfer.weights.receiver_service import ReceiverService
from tailrace.transfer.weights.segments import Attachments, Pool, Segment
from tailrace.transfer.weights.versions import Manifest, StoredVersion, encode_manifest, plan_payload
from tailrace.transfer.wire.connection import Patience
from tailrace.transfer.wire.server import Server
from tailrace.transfer.wire.sockets import host_id
from tests.transfer.wire.desk import TOKEN


def manifest(serial: int) -> Manifest:
    return plan_payload(serial, serial, {"w": torch.zeros(64, dtype=torch.int8)}, dtype=None, chunk_bytes=64)


class Receiver:
    """A service whose thread does not run, and a sender's memory."""

    def __init__(self, directory: Path) -> None:
        self.theirs = Pool(directory)
        self.server = Server("receiver", TOKEN, WEIGHTS, endpoints=["ipc://*"])
        self.pool = Pool(directory)
        self.attachments = Attachments()
        self.service = ReceiverService(
            self.server,
            WeightsAddress(endpoints=self.server.endpoints, host=host_id(), token=TOKEN),
            name="receiver",
            host=host_id(),
            datacentre="",
            medium="auto",
            patience=Patience(),
            pool=self.pool,
            log=None,
        )
        self.segments: dict[int, Segment] = {}

    def attach(self, serial: int) -> StoredVersion:
        """A version in the sender's memory that the receiver has."""
        planned = manifest(serial)
        own = self.segments[serial] = self.theirs.take(planned.nbytes, serial, busy=list(self.segments.values()))
        segment = self.attachments.attach(own.path, serial, planned.nbytes)
        stored = StoredVersion(planned, encode_manifest(planned), segment)
        self.service._chunk_server.add(stored)
        return stored

    def close(self) -> None:
        self.service.join()
        self.server.stop()
        self.server.run(self.service)
        self.attachments.close()
        self.pool.close()
        self.theirs.close()


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Receiver]:
    made = Receiver(tmp_path)
    yield made
    made.close()


def test_memory_of_others_is_let_go_of_when_room_of_its_own_is_taken(receiver: Receiver) -> None:
    receiver.attach(1)
    read = receiver.attach(2)
    receiver.service.received = receiver.attach(3)
    coming = receiver.attach(4)
    read.users += 1
    receiver.service.take(manifest(4), lambda outcome: None)
    can_be_used_again = {serial: segment.renew(9) for serial, segment in receiver.segments.items()}
    assert can_be_used_again == {1: True, 2: False, 3: False, 4: False}, "read, the newest, and what is moved yet"
    read.users -= 1
    coming.segment.release()  # as the download does when it has moved
    receiver.service.tidy()
    assert receiver.segments[2].renew(9)


def test_what_was_let_go_of_once_is_not_let_go_of_again(receiver: Receiver) -> None:
    receiver.attach(1)
    receiver.service.received = receiver.attach(2)
    receiver.service.take(manifest(3), lambda outcome: None)
    receiver.service.tidy()
    assert receiver.service._chunk_server.serials == [2]
