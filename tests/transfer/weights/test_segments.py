"""Shared memory that is removed while other processes hold it."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.errors import ConfigError
from tailrace.transfer.weights.receiver import WeightReceiver
from tailrace.transfer.weights.segments import Attachments, Pool, Segment, check_shared_memory
from tailrace.transfer.weights.sender import WeightSender
from tests.transfer.weights.helpers import LIMIT_S, check, tensors

NBYTES = 64


class Sides:
    """An owner with a segment for each serial, and a reader."""

    def __init__(self, directory: Path) -> None:
        self.pool = Pool(directory)
        self.reader = Attachments()
        self._made: list[Segment] = []

    def made(self, serial: int) -> Segment:
        segment = self.pool.take(NBYTES, serial, busy=self._made)
        self._made.append(segment)
        return segment

    def attached(self, serial: int) -> Segment:
        return self.reader.attach(self.made(serial).path, serial, NBYTES)


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[Sides]:
    made = Sides(tmp_path)
    yield made
    made.reader.close()
    made.pool.close()


def test_a_removed_segment_is_there_for_those_that_hold_it_and_is_closed_by_the_last(sides: Sides) -> None:
    held = sides.attached(1)
    assert sides.reader.attach(held.path, 1, NBYTES) is held
    held.path.unlink()
    assert not held.is_there
    sides.attached(2)  # this notices it
    assert held.is_open
    assert held.serial == 1
    held.release()
    assert held.is_open
    held.release()
    assert not held.is_open


def test_a_removed_segment_that_nobody_holds_is_closed(sides: Sides) -> None:
    segment = sides.attached(1)
    segment.release()
    segment.path.unlink()
    sides.attached(2)
    assert not segment.is_open


def test_a_reader_that_closes_lets_go_of_what_was_removed_too(sides: Sides) -> None:
    held = sides.attached(1)
    held.path.unlink()
    sides.attached(2)
    sides.reader.close()
    assert not held.is_open


def test_another_file_under_the_same_path_is_another_segment(sides: Sides) -> None:
    held = sides.attached(1)
    other = sides.made(2)
    other.path.rename(held.path)
    assert not held.is_there
    assert sides.reader.attach(held.path, 2, NBYTES) is not held
    held.release()
    assert not held.is_open


def test_an_owner_whose_directory_was_removed_ends_like_any_other(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    pool.take(NBYTES, 1, busy=[])
    shutil.rmtree(pool.directory)
    pool.close()


async def test_versions_that_are_read_while_their_memory_is_removed_end_nothing(tmp_path: Path) -> None:
    """The two readers are slow one after the other, so the sender removes a segment that both have mapped."""
    with (
        WeightSender(directory=tmp_path) as sender,
        WeightReceiver(sender.address, name="one", directory=tmp_path) as one,
        WeightReceiver(sender.address, name="other", directory=tmp_path) as other,
    ):

        async def publish(version: int) -> None:
            sender.publish(version, tensors(version).items())
            for engine in (one, other):
                assert await engine.wait(version, timeout_s=LIMIT_S) == version

        await publish(0)
        with one.weights():
            await publish(1)
            with other.weights():
                for version in (2, 3, 4):
                    await publish(version)
        for version in (5, 6):
            await publish(version)
            for engine in (one, other):
                check(engine, version)


def test_a_machine_without_shared_memory_is_known_before_anything_starts(tmp_path: Path) -> None:
    check_shared_memory(tmp_path)
    with pytest.raises(ConfigError, match=r"placement=separated: .*No such file or directory; .*placement=colocated"):
        check_shared_memory(tmp_path / "none")
    assert list(tmp_path.iterdir()) == []
