"""Processes are started, ended and described in one way."""

import subprocess
import sys
from pathlib import Path
from subprocess import DEVNULL, PIPE

import psutil

from tailrace.host.children import kill_group, last_output, python_module
from tests.helpers.waiting import until

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


def test_a_process_of_a_pool_ends_with_its_parent_that_was_killed() -> None:
    code = """
import os, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from tailrace.host.descendants import end_with_parent
pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=end_with_parent)
print(pool.submit(os.getpid).result(), flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=DEVNULL, stdout=PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
        until(lambda: not psutil.pid_exists(pid))


def test_only_who_has_said_something_has_last_words() -> None:
    assert last_output("oops") == "; its last output: oops"
    assert last_output("") == ""
