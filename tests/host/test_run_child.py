"""A program that is run to its end, or of which nothing is left."""

import sys
from pathlib import Path
from subprocess import DEVNULL, TimeoutExpired

import psutil
import pytest

from tailrace.host.run_child import run_child

SLEEPS = "import signal, subprocess, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN if {stubborn} else "
ENDS = "lambda *_: sys.exit(3)); "
GRANDCHILD = "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
TELLS = "print(child.pid, flush=True); time.sleep(600)"


def test_the_exit_code_is_returned() -> None:
    assert run_child([sys.executable, "-c", "raise SystemExit(7)"], stdout=DEVNULL) == 7


def test_variables_are_added_to_those_of_this_process() -> None:
    program = "import os; raise SystemExit(int(os.environ['MORE']) if 'PATH' in os.environ else 1)"
    assert run_child([sys.executable, "-c", program], stdout=DEVNULL, environment={"MORE": "5"}) == 5


def test_what_cannot_be_started_is_an_error_of_the_system() -> None:
    with pytest.raises(FileNotFoundError):
        run_child(["no-such-program"], stdout=DEVNULL)


@pytest.mark.parametrize("stubborn", [False, True])
def test_nothing_is_left_of_a_program_that_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stubborn: bool
) -> None:
    monkeypatch.setattr("tailrace.host.run_child._ASKED_LIMIT_S", 0.5)
    before = set(psutil.Process().children())
    program = (SLEEPS + ENDS + GRANDCHILD + TELLS).format(stubborn=stubborn)
    with (tmp_path / "pid").open("w") as told, pytest.raises(TimeoutExpired):
        run_child([sys.executable, "-c", program], stdout=told, limit_s=2.0)
    if pid := (tmp_path / "pid").read_text():
        assert not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE
    assert set(psutil.Process().children()) <= before
