"""The parent's end of one process of a queue."""

import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, STDOUT

import msgspec

from tailrace.errors import QueueError
from tailrace.host.children import EXIT_LIMIT_S, python_module
from tailrace.transfer.queue.processes.serve import LOG_TIME, ControllerSettings, Failed, Message, UnitSettings

KILLED_LIMIT_S = 5.0
"""Seconds for a killed process to be gone. It takes milliseconds; a process stuck in the kernel is left alone."""
_TAIL_BYTES = 2000
_SEND_LIMIT_S = 10.0
"""Seconds to send the settings, which fit the socket's buffer."""


class Child:
    """A process that serves according to its settings.

    Its output is appended to `log`. There a line says when the process is started, and another why it has ended.
    """

    def __init__(self, name: str, settings: ControllerSettings | UnitSettings, log: Path) -> None:
        """Start the process. It reports later whether it listens, see `hear`.

        Raises:
            QueueError: the machine has no room for another process, or the log cannot be written.
        """
        self.name = name
        self.log = log
        self._heard = b""
        self._reason = ""
        """Why the process has ended, as far as it is known."""
        try:
            self._channel = self._start()
        except OSError as error:
            raise QueueError(
                f"no process can be started for {name} of the queue, with the log {log}: {error.strerror}"
            ) from None
        self._channel.settimeout(_SEND_LIMIT_S)
        try:
            self._channel.sendall(msgspec.json.encode(settings) + b"\n")
        except ConnectionError:
            pass  # the process has died, and `hear` reports it
        except TimeoutError:
            self.end(EXIT_LIMIT_S)
            raise QueueError(f"{name} of the queue has not taken its settings within {_SEND_LIMIT_S:g} s") from None

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        command = (*python_module("tailrace.transfer.queue.processes.serve"), str(os.getpid()), str(theirs.fileno()))
        with theirs:
            try:
                with self.log.open("ab", buffering=0) as log:
                    with suppress(OSError):  # a full disk: the process itself reports whether it can do without
                        log.write(f"{time.strftime(LOG_TIME)} {self.name} is started\n".encode())
                    self._log_start = log.tell()
                    # In a new session it does not get Ctrl-C: the parent may have rows to save before the queue ends.
                    self._process = subprocess.Popen(
                        command,
                        stdin=DEVNULL,
                        stdout=log,
                        stderr=STDOUT,
                        pass_fds=[theirs.fileno()],
                        start_new_session=True,
                    )
            except OSError:
                ours.close()
                raise
        return ours

    @property
    def pid(self) -> int:
        """The pid of the process."""
        return self._process.pid

    def fileno(self) -> int:
        """The descriptor of the socket: it is readable when `hear` returns at once."""
        return self._channel.fileno()

    def hear(self) -> list[Message]:
        """Wait for messages of the process and return them; none once it has hung up.

        Raises:
            QueueError: it sent half a line, or a line that is not a message.
        """
        try:
            while b"\n" not in self._heard:
                if not (heard := self._channel.recv(4096)):
                    return []
                self._heard += heard
            *lines, self._heard = self._heard.split(b"\n")
            messages = [msgspec.json.decode(line, type=Message) for line in lines]
        except ConnectionError:
            return []
        except (TimeoutError, msgspec.DecodeError) as error:
            raise QueueError(f"{self.name} of the queue, see {self.log}, cannot be understood: {error}") from None
        for message in messages:
            if isinstance(message, Failed):
                self._reason = message.reason
        return messages

    def obituary(self) -> str:
        """End a process that has hung up. Return a line that says how it died."""
        self.end(EXIT_LIMIT_S)
        return f"{self.name} of the queue ended ({self._how}, see {self.log}){self._because}"

    @property
    def _how(self) -> str:
        code = self._process.returncode
        return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"

    @property
    def _because(self) -> str:
        return f": {self._reason}" if self._reason else ""

    def _last_words(self) -> str:
        """Return the last line that the process has printed, if any."""
        with self.log.open("rb") as log:
            log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def _note_end(self) -> None:
        """Read from the log why the process has ended, and add to the log how, if it failed."""
        self._reason = self._reason or self._last_words()
        if self._process.returncode != 0:
            with self.log.open("a") as log:
                log.write(f"{time.strftime(LOG_TIME)} {self.name} ended ({self._how}){self._because}\n")

    def kill(self, reason: str) -> None:
        """Kill the process. Its end is heard like any other. Calling this twice is harmless."""
        self._reason = reason
        self._process.kill()

    def hang_up(self) -> None:
        """Tell the process to end. Calling this twice is harmless."""
        with suppress(OSError):  # either side has hung up before
            self._channel.shutdown(socket.SHUT_RDWR)  # takes effect even while a forked process has a copy
        self._channel.close()

    def end(self, limit_s: float) -> None:
        """Tell the process to end, and kill it if it has not ended within `limit_s`. Calling this twice is harmless."""
        self.hang_up()
        if self._process.returncode is not None:
            return
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._reason = f"killed, since it had not ended within {limit_s:.1f} s"
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(KILLED_LIMIT_S)
        with suppress(OSError):  # the log was removed, or its disk is full: `obituary` still says how it died
            self._note_end()
