"""Files that commands write are made or replaced where that is wanted, and nothing else is."""

import os
from pathlib import Path

import pytest

from tailrace.commands.files import check_new_file
from tailrace.commands.json_lines import JsonLines
from tailrace.commands.planned_files import check_new_plan
from tailrace.errors import UserError


@pytest.mark.parametrize("force", [False, True])
def test_no_file_takes_the_place_of_a_device_or_a_pipe(tmp_path: Path, force: bool) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/null"), tmp_path / "pipe"):
        with pytest.raises(UserError, match=r"^--json \S+ is a device or a pipe, which a file would replace"):
            check_new_file("--json", path, force=force)


def test_lines_are_written_to_a_device() -> None:
    with JsonLines(Path("/dev/null"), force=False):
        pass
    assert Path("/dev/null").is_char_device()


def test_a_link_to_nothing_is_there(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(UserError, match="link exists; give another file, or replace it with --force"):
        check_new_file("--output", tmp_path / "link", force=False)


def test_a_file_that_cannot_be_replaced_whole_is_refused_before_it_is_written() -> None:
    with pytest.raises(UserError, match=r"^--json /proc/self/comm cannot be made: "):
        check_new_file("--json", Path("/proc/self/comm"), force=True)


@pytest.mark.parametrize("output", [".", "/"])
def test_a_plan_is_not_written_to_a_directory(output: str) -> None:
    with pytest.raises(UserError, match=f"^--output {output} is a directory; give a file$"):
        check_new_plan(Path(output), force=True)
