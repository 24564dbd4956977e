"""Tests in virtual time."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

from tailrace.host.virtual_loop import VirtualLoop


def virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test in a loop of its own with virtual time."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run


async def settle() -> None:
    """Let every task run until it waits. No time passes."""
    for _ in range(10):
        await asyncio.sleep(0)
