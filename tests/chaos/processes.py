"""The processes of a round's run: their roles, and what they leave open."""

import ctypes
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_PARTS = {
    "tailrace.cluster.cleanup": "cleanup",
    "tailrace.rewards.serve": "grader",
    "gcs/gcs_server": "gcs_server",
    "raylet/raylet": "raylet",
    "ray::RuntimeEnvAgent": "runtime env agent",
    "runtime_env/agent/main.py": "runtime env agent",
    "ray::DashboardAgent": "dashboard agent",
    "dashboard/agent.py": "dashboard agent",
    "dashboard/dashboard.py": "dashboard",
    "monitor.py": "monitor",
    "ray::Keeper": "keeper",
}
"""The role of a process, by a part of its command line."""
_LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
SHARED = Path("/dev/shm")


def adopt_orphans() -> None:
    """Make this process the parent of every orphan among its descendants."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def family() -> list[psutil.Process]:
    """All living descendants of this process. Those that have ended are reaped."""
    alive = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive


def role(process: psutil.Process) -> str:
    """The role of `process` in the run; empty if it has none of interest."""
    try:
        words: list[str] = process.cmdline()
        if "tailrace.transfer.queue.processes.serve" in words:
            return Path(os.readlink(f"/proc/{process.pid}/fd/1")).stem  # its log is named after it
    except (psutil.Error, OSError):
        return ""
    if "tailrace.cluster.serve" in words:
        name = words[words.index("tailrace.cluster.serve") + 1].replace("ray", "broker")
        if "tailrace.cluster.guard" not in words:
            return name
        return "broker's guard" if name == "broker" else "guard"
    line = " ".join(words)
    return next((role for part, role in _PARTS.items() if part in line), "")


def exposed() -> Iterator[str]:
    """Yield the run's sockets that other machines can connect to."""
    for process in family():
        with suppress(psutil.Error):
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.ip not in _LOOPBACK:
                    yield f"{role(process) or process.name()} listens at {connection.laddr.ip}"


def open_to_others(directories: list[Path]) -> Iterator[str]:
    """Yield this user's files in shared `directories` that other users may enter, read or write."""
    for path in (path for directory in directories for path in directory.iterdir()):
        with suppress(FileNotFoundError):
            known = path.lstat()
            if known.st_mode & 0o077 and not stat.S_ISLNK(known.st_mode):
                yield f"{path} has mode {stat.S_IMODE(known.st_mode):04o}"


def shared_memory() -> set[Path]:
    """The shared memory of Tailrace and Ray on this machine."""
    return {path for path in SHARED.iterdir() if "tailrace" in path.name or "plasma" in path.name}


def gone(limit_s: float) -> list[str]:
    """Wait until all descendants of this process have ended, and return those left after `limit_s`. They are killed."""
    deadline = time.monotonic() + limit_s
    while (left := family()) and time.monotonic() < deadline:
        time.sleep(0.05)
    names = [f"{role(process) or ' '.join(_words(process))[:80]} ({process.pid})" for process in left]
    while left := family():
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=5.0)
    return names


def _words(process: psutil.Process) -> list[str]:
    try:
        words: list[str] = process.cmdline()
        return words
    except psutil.Error:
        return []
