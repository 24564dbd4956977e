"""Follow the progress of a run, and harm it when its plan says so."""

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.chaos.plan import Fault
from tests.chaos.processes import family, role

_LOOK_S = 0.003
"""The time between looks at a run's files: a tiny model's checkpoint is written in some milliseconds."""
_TRY_S = 0.04
"""The time between searches for a victim."""
_MOST_ARE_THERE = 3
"""The number of events after which most processes are there. A trainer worker has started by then."""
_CHECKPOINT = re.compile(r"step_\d+")
"""The checkpoint's part of a file name, also while it is written."""
_LOOK_AT_PROCESSES_S = 0.3
"""The time between looks at the run's processes, which cost more."""


class Progress:
    """The progress of a run, counted by the files it has written and the processes it has started."""

    def __init__(self, run: Path) -> None:
        """`run`: the run's directory."""
        self._run = run
        self._read = 0
        self._looked_at = 0.0
        self._pids: set[int] = set()
        self._checkpoints: set[str] = set()
        self.counts = {"processes": 0, "event": 0, "weights": 0, "checkpoint": 0, "export": 0, "end": 0}

    def look(self) -> None:
        """Update the counts."""
        if time.monotonic() - self._looked_at > _LOOK_AT_PROCESSES_S:
            self._pids |= {process.pid for process in family()}
            self.counts["processes"] = len(self._pids)
            self._looked_at = time.monotonic()
        with suppress(FileNotFoundError), (self._run / "events.jsonl").open("rb") as file:
            file.seek(self._read)
            written = file.read()
            whole = written[: written.rfind(b"\n") + 1]
            self._read += len(whole)
            self.counts["event"] += whole.count(b"\n")
            self.counts["weights"] += whole.count(b'"weights_')
            self.counts["end"] += whole.count(b'"task":"export"')
        with suppress(FileNotFoundError):
            found = map(_CHECKPOINT.search, os.listdir(self._run / "checkpoints"))
            self._checkpoints |= {name[0] for name in found if name}
            self.counts["checkpoint"] = len(self._checkpoints)
        with suppress(FileNotFoundError):
            names = os.listdir(self._run)
            self.counts["export"] += not self.counts["export"] and any("model" in name for name in names)


@dataclass(slots=True)
class Harm:
    """The faults of a run, due or done."""

    driver: int
    """The pid of the driver."""
    faults: list[Fault]
    done: list[Fault] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    """The faults that were done, each with the pid of its victim."""
    _paused: dict[int, float] = field(default_factory=dict)
    """The end of each pause, by pid."""
    _looked_at: float = 0.0

    def when(self, counts: dict[str, int]) -> None:
        """Do the faults that are due at `counts`."""
        for pid, until in list(self._paused.items()):
            if time.monotonic() >= until:
                del self._paused[pid]
                _signal(pid, signal.SIGCONT)
        due = [fault for fault in self.faults if counts[fault.moment] >= fault.number]
        if due and time.monotonic() - self._looked_at > _TRY_S:
            self._looked_at = time.monotonic()
            for fault in due:
                if (victim := self._find(fault.victim)) is not None:
                    self.faults.remove(fault)
                    self._do(fault, victim)

    def _find(self, victim: str) -> int | None:
        if victim == "driver":
            return self.driver
        return next((process.pid for process in family() if role(process) == victim), None)

    def _do(self, fault: Fault, pid: int) -> None:
        _signal(pid, {"kill": signal.SIGKILL, "interrupt": signal.SIGINT}.get(fault.how, signal.SIGSTOP))
        if fault.how == "pause":
            self._paused[pid] = time.monotonic() + fault.pause_s
        self.done.append(fault)
        self.told.append(f"{fault} ({pid})")


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def follow(
    driver: int, run: Path, faults: list[Fault], limit_s: float, look_around: Callable[[], None]
) -> tuple[int | None, Harm]:
    """Harm the run until its driver ends. Return the exit code, or None if the driver has not ended in time.

    `look_around` is called once, when most processes are there. It takes so long that later moments would be missed.
    """
    progress, harm = Progress(run), Harm(driver, faults)
    has_looked = False
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        pid, status = os.waitpid(driver, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status), harm
        progress.look()
        if not has_looked and progress.counts["event"] >= _MOST_ARE_THERE:
            has_looked = True
            look_around()
        harm.when(progress.counts)
        time.sleep(_LOOK_S)
    with suppress(psutil.Error):
        harm.told.append("waited for: " + ", ".join(filter(None, {role(process) for process in family()})))
    return None, harm
