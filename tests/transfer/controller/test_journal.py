from pathlib import Path

import pytest

from tailrace.errors import QueueError
from tailrace.transfer.queue.control_plane import ControlPlane
from tailrace.transfer.queue.controller.journal import Advanced, Base, Change, Closed, Journal
from tests.transfer.tables import table


def base() -> Base:
    tasks = table()
    return Base([task.spec for task in tasks], ControlPlane(tasks, lease_s=1.0).export(), False, 0)


def written(path: Path, *changes: Change) -> list[Base | Change]:
    """A journal with a base and these."""
    journal = Journal(path)
    journal.replace(base(), [])
    for change in changes:
        journal.append(change)
    journal.close()
    return [base(), *changes]


def read(path: Path) -> list[Base | Change]:
    journal = Journal(path)
    try:
        return list(journal.records())
    finally:
        journal.close()


def test_a_journal_holds_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    assert read(path) == []
    assert read(path) == []
    records = written(path, Advanced(1), Closed())
    assert read(path) == records


@pytest.mark.parametrize("cut", range(1, 14))
def test_what_was_not_written_whole_is_cut_off_and_written_anew(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "journal"
    records = written(path, Advanced(1), Advanced(2))
    data = path.read_bytes()
    path.write_bytes(data[:-cut])
    journal = Journal(path)
    assert list(journal.records()) == records[:-1]
    journal.append(Advanced(3))
    journal.close()
    assert read(path) == [*records[:-1], Advanced(3)]


@pytest.mark.parametrize("zeros", [1, 8, 4096])
def test_zeros_at_the_end_are_nothing(tmp_path: Path, zeros: int) -> None:
    path = tmp_path / "journal"
    records = written(path, Advanced(1))
    path.write_bytes(path.read_bytes() + bytes(zeros))
    assert read(path) == records


def test_a_record_that_is_corrupt_in_the_middle_is_not_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path, Advanced(1), Advanced(2))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(QueueError, match=r"corrupt at byte \d+ of .*; serve another directory"):
        read(path)
    assert path.read_bytes() == data, "nothing is cut off"


def test_a_journal_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path)
    journal = Journal(path)
    list(journal.records())
    journal.append(123)  # type: ignore[arg-type]
    journal.close()
    with pytest.raises(QueueError, match="is not one of this version"):
        read(path)
