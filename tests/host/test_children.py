"""Processes are started, ended and described in one way."""

import subprocess
import sys
from pathlib import Path
from subprocess import DEVNULL, PIPE

from tailrace.host.children import kill_group, last_output, python_module

LIMIT_S = 60


def test_a_module_of_ours_is_not_disturbed_by_files_of_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "signal.py").write_text("raise SystemExit('the wrong signal')\n")
    done = subprocess.run(
        python_module("tailrace.host.children", "-u"), cwd=tmp_path, capture_output=True, timeout=LIMIT_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_group_is_killed_with_what_its_leader_has_started() -> None:
    code = "import subprocess, sys, time; subprocess.Popen(['sleep', '600']); print('up', flush=True); time.sleep(600)"
    command = [sys.executable, "-c", code]
    leader = subprocess.Popen(command, stdin=DEVNULL, stdout=PIPE, start_new_session=True)
    assert leader.stdout is not None
    with leader.stdout as output:
        assert output.readline() == b"up\n"
        kill_group(leader.pid)
        assert output.read() == b"", "its child held the other end"
    assert leader.wait(LIMIT_S) == -9
    kill_group(leader.pid)  # a group that is gone


def test_only_who_has_said_something_has_last_words() -> None:
    assert last_output("oops") == "; its last output: oops"
    assert last_output("") == ""
