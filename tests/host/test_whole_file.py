"""A file is there whole or not at all."""

from pathlib import Path

import pytest

from tailrace.host.whole_file import whole_file


def test_a_file_takes_its_place_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "figures"
    path.write_text("old")
    with whole_file(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "figures"
    path.write_text("old")

    def write() -> None:
        with whole_file(path) as partial:
            partial.write_text("ne")
            raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="the disk is full"):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
