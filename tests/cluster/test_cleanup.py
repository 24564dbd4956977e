"""What is removed when a Ray has ended."""

import tempfile
from pathlib import Path

import pytest

from tailrace.cluster.cleanup import clean_up


def test_what_killed_workers_have_left_goes_with_the_files_of_their_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tmp_path / "ray"
    files.mkdir()
    with tempfile.TemporaryDirectory() as temporary:  # a path shorter than pytest's, as sockets need it
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        sockets = Path(temporary) / "tailrace-ipc-orphan"
        sockets.mkdir(mode=0o700)
        (sockets / "socket").touch()
        clean_up("the mark of nobody", str(files))
        assert not files.exists()
        assert list(Path(temporary).iterdir()) == []
