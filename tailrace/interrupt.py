"""Ctrl-C or SIGTERM: the first one asks a run to stop, the second one ends the process.

Only a program's main thread gets signals. A run in another thread is asked to stop with `Interrupt.ask`.
"""

import asyncio
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SAME_S = 1.0
"""Signals that come within so many seconds count as one: `timeout` signals its child, then the group that it is in."""


class Interrupt:
    """Cancels the task that watches on the first SIGINT or SIGTERM; a second one exits at once."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self.asked = False
        """Whether the run was asked to stop."""
        self._clock = clock
        self._signalled_at = -math.inf
        """When the first signal came."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """While a task watches, its loop."""
        self._changing = threading.Lock()

    @contextmanager
    def watching(self) -> Iterator[Self]:
        """Watch in the block, for the current task. Only the main thread's loop handles the signals."""
        task = asyncio.current_task()
        assert task is not None
        self._task = task
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
            for number in _signals():
                loop.remove_signal_handler(number)

    def handle_signals(self) -> None:
        """Handle them from now on; again, where a library may have put handlers of its own in the place of these."""
        for number in _signals():
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def ask(self) -> None:
        """Ask the run to stop, from any thread; one that has not begun stops when it does. Twice is harmless."""
        with self._changing:
            if not self.asked and self._loop is not None:
                self._loop.call_soon_threadsafe(self._task.cancel)
            self.asked = True

    def accept(self) -> None:
        """The cancellation has arrived: the task may wait for things again, to save them."""
        self._task.uncancel()

    def _on_signal(self) -> None:
        if self.asked:
            if self._clock() - self._signalled_at >= _SAME_S:
                os._exit(INTERRUPTED)
            return
        self.asked = True
        self._signalled_at = self._clock()
        print("Stopping; once more to exit at once.", file=sys.stderr, flush=True)
        self._task.cancel()


def _signals() -> tuple[signal.Signals, ...]:
    return SIGNALS if threading.current_thread() is threading.main_thread() else ()
