"""Ctrl-C: the first one asks a run to stop, the second one ends the process."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Cancels the task that made it on the first SIGINT or SIGTERM; a second one exits at once."""

    def __init__(self) -> None:
        self.asked = False
        """Whether the run was asked to stop."""
        task = asyncio.current_task()
        assert task is not None
        self._task = task

    @classmethod
    @contextmanager
    def watching(cls) -> Iterator[Self]:
        """Handle the signals in the block, in the running event loop."""
        interrupt = cls()
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, interrupt._on_signal)
        try:
            yield interrupt
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def accept(self) -> None:
        """The cancellation has arrived: the task may wait for things again, to save them."""
        self._task.uncancel()

    def _on_signal(self) -> None:
        if self.asked:
            os._exit(INTERRUPTED)
        self.asked = True
        print("Stopping; once more to exit at once.", file=sys.stderr, flush=True)
        self._task.cancel()
