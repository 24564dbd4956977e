"""Ctrl-C, SIGTERM or a terminal that closes: the first signal asks a run to stop, the second ends the process.

Only a program's main thread gets signals. A run in another thread is asked to stop with `Interrupt.ask`.
"""

import asyncio
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Self

INTERRUPTED = 130
"""The exit code after Ctrl-C, as in shells."""
_ALWAYS = (signal.SIGINT, signal.SIGTERM)
_SAME_S = 1.0
"""Signals within this many seconds count as one: `timeout` signals its child, then the child's group."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask a process to stop: SIGINT, SIGTERM, and SIGHUP unless it is ignored, as under `nohup`."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return _ALWAYS if ignored else (*_ALWAYS, signal.SIGHUP)


@contextmanager
def handling(numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle these signals with `handler` inside the block, and as before after it. For the main thread."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class Signalled:
    """Tells signals on purpose from those that come with the first one."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._first_at = math.inf

    def counts(self, number: int) -> bool:
        """Whether a signal is the first, or one on purpose after it: a terminal that closes may send several SIGHUP."""
        now = self._clock()
        if math.isinf(self._first_at):
            self._first_at = now
            return True
        return number != signal.SIGHUP and now - self._first_at >= _SAME_S


class Interrupt:
    """Cancels the watching task on the first signal of `stop_signals`; a second one exits at once."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self.asked = False
        """Whether the run was asked to stop."""
        self._signalled = Signalled(clock=clock)
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop of the watching task, while one watches."""
        self._signals: tuple[signal.Signals, ...] = ()
        """The handled signals; none outside a program's main thread."""
        self._changing = threading.Lock()

    @contextmanager
    def watching(self) -> Iterator[Self]:
        """Watch for the current task inside the block. Only the main thread's loop handles the signals."""
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._signals = stop_signals() if threading.current_thread() is threading.main_thread() else ()
        loop = asyncio.get_running_loop()
        self.handle_signals()
        with self._changing:
            self._loop = loop
            if self.asked:
                task.cancel()
        try:
            yield self
        finally:
            with self._changing:
                self._loop = None
            for number in self._signals:
                loop.remove_signal_handler(number)

    def handle_signals(self) -> None:
        """Install the signal handlers. Call this again where a library may have installed its own in their place."""
        for number in self._signals:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    def ask(self) -> None:
        """Ask the run to stop, from any thread; one that has not begun stops when it begins. Repeats are harmless."""
        with self._changing:
            if not self.asked and self._loop is not None:
                self._loop.call_soon_threadsafe(self._task.cancel)
            self.asked = True

    def accept(self) -> None:
        """Accept the cancellation, so that the task may wait again in order to save its work."""
        self._task.uncancel()

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._signalled.counts(number):
            return
        if self.asked:
            os._exit(INTERRUPTED)
        self.asked = True
        self._task.cancel()
        with suppress(OSError):  # the terminal has closed, or the reader of the pipe has ended
            print("Stopping; once more to exit at once.", file=sys.stderr, flush=True)
