"""Run a program to its end, and leave nothing of it when that is not waited for."""

import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from types import FrameType
from typing import IO

import psutil

from tailrace.host.descendants import kill_all
from tailrace.host.interrupt import handling, stop_signals

_ASKED_LIMIT_S = 60.0
"""Seconds that a program has to end after it was asked to: a run saves and stops its workers."""


def run_child(
    command: Sequence[str],
    *,
    stdout: IO[str] | int,
    limit_s: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run a command. Returns its exit code.

    A program that takes too long, and one that Ctrl-C or another of `stop_signals` interrupts here, is asked to end as
    by Ctrl-C. What it leaves, or is itself after a minute, is killed.

    Args:
        command: the program and its arguments.
        stdout: where its output goes.
        limit_s: seconds that it may take; None where its own waits have limits.
        environment: variables in addition to those of this process.

    Raises:
        OSError: it cannot be started.
        subprocess.TimeoutExpired: it took too long.
        KeyboardInterrupt: this process was asked to stop.
    """
    whole = {**os.environ, **(environment or {})}
    with _interrupting(), subprocess.Popen(command, stdout=stdout, env=whole) as child:
        try:
            return child.wait(limit_s)
        except BaseException:
            _end(child)
            raise


def _interrupting() -> AbstractContextManager[None]:
    """Have every signal that asks this process to stop interrupt a block, as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():  # only that one gets signals
        return nullcontext()
    return handling(stop_signals(), _interrupt)


def _interrupt(number: int, _: FrameType | None) -> None:
    if number != signal.SIGINT:
        signal.signal(number, signal.SIG_IGN)  # `timeout` sends it twice; the second would interrupt the ending
    raise KeyboardInterrupt


def _end(child: "subprocess.Popen[bytes]") -> None:
    begun = _with_descendants(child.pid)  # orphans are not found below this process afterwards
    child.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):  # whoever presses Ctrl-C again does not wait
        child.wait(_ASKED_LIMIT_S)
    begun += _with_descendants(child.pid)
    kill_all(lambda: [process for process in begun if _is_alive(process)])


def _with_descendants(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
