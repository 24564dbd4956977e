"""Turns of programs: each does one step when it is told to, and says how long it took.

A program under test does a step for each of `turns()`, or calls `wait()` before it, and `done(...)` after it. The
benchmark holds a `Contestant` for each program. A program that waits is blocked in a read, so another has the machine
to itself.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


def turns() -> Iterator[dict[str, Any]]:
    """Yield the tasks of the benchmark, step by step, until it has had enough."""
    for line in sys.stdin:
        yield json.loads(line)


def wait() -> None:
    """Block until the benchmark asks for a step; exit when it has had enough. Use it in a loop that cannot be left."""
    if not sys.stdin.readline():
        os._exit(0)


def done(**figures: Any) -> None:
    """Report the figures of a step to the benchmark."""
    sys.stderr.flush()
    print("STEP " + json.dumps(figures), flush=True)


class Contestant:
    """A program under test, in a process of its own."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        """`environment`: variables in addition to those of this process; `log`: the file for its stderr."""
        self._log = log.open("wb")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **environment},
        )

    def step(self, timeout_s: float = 600.0, **task: Any) -> dict[str, Any]:
        """Let the program do one step, which `task` describes to it, and return the figures that it reports.

        Raises:
            RuntimeError: the program ended, or was killed because the step took longer than `timeout_s`.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        alarm = threading.Timer(timeout_s, self._process.kill)
        alarm.start()
        try:
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
            for line in self._process.stdout:
                if line.startswith("STEP "):
                    figures: dict[str, Any] = json.loads(line.removeprefix("STEP "))
                    return figures
        except BrokenPipeError:
            pass
        finally:
            alarm.cancel()
        raise RuntimeError(f"{self._process.args!r} ended before its step was done; see {self._log.name}")

    def stop(self) -> None:
        """Let the program end; kill it where it does not within 30 seconds."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        see_off(self._process)
        self._log.close()


def output_of(command: Sequence[str], *, timeout_s: float) -> str:
    """Return the stdout of a program. A program that takes longer is asked to end, so that it can clean up.

    Raises:
        RuntimeError: the program failed.
        subprocess.TimeoutExpired: the program took longer.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            raise
        finally:
            see_off(process)
    if process.returncode:
        raise RuntimeError(f"{command!r} ended with exit code {process.returncode}; its error is above")
    return output


def see_off(process: "subprocess.Popen[Any]") -> None:
    """Wait until the process has ended; kill it where it does not within 30 seconds."""
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=30)
