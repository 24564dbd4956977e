"""Graders that a pool must survive, and ones that cannot be made."""

import ctypes
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

NOT_CALLABLE = 3


def act(response: str, answer: Any, prompt: str, metadata: dict[str, Any]) -> Any:
    """Does what the response says."""
    return DEEDS.get(response, lambda: 0.5)()


def loop() -> None:
    """Never ends."""
    while True:
        pass


def shout() -> float:
    """Fills both output streams."""
    print("x" * 1_000_000, flush=True)
    print("y" * 1_000_000, file=sys.stderr, flush=True)
    os.write(1, b"\x00" * 100_000)
    return 1.0


def die_with_last_words() -> None:
    """Says why it dies."""
    print("the disk is full", flush=True)
    os._exit(5)


def fail_at_length() -> None:
    """An error message of two megabytes on a million lines."""
    raise ValueError("z\n" * 1_000_000)


DEEDS: dict[str, Callable[[], Any]] = {
    "loop": loop,
    "hold the lock": lambda: re.match(r"(a+)+$", "a" * 64 + "b"),  # in C, without a moment for another thread
    "exit": lambda: os._exit(3),
    "sys.exit": lambda: sys.exit(4),
    "crash": lambda: ctypes.string_at(0),
    "print": shout,
    "last words": die_with_last_words,
    "read": lambda: float(len(sys.stdin.read())),
    "divide": lambda: 1 / 0,
    "long error": fail_at_length,
    "nan": lambda: float("nan"),
    "text": lambda: "1.0",
    "true": lambda: True,
    "numpy's true": lambda: np.True_,
}


def announce(response: str, answer: Any, prompt: str, metadata: dict[str, Any]) -> float:
    """Start a child, leave its process id in the file `response`, then act as `prompt` says."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    path = Path(response)
    path.with_suffix(".part").write_text(f"{os.getpid()} {child.pid}")
    path.with_suffix(".part").rename(path)
    act(prompt, answer, "", {})
    time.sleep(600)
    return 0.0


def once(response: str, answer: Any, prompt: str, metadata: dict[str, Any]) -> float:
    """Dies the first time that it sees the path `response`."""
    if not Path(response).exists():
        Path(response).touch()
        os._exit(1)
    return 1.0


def weighted(response: str, answer: Any, prompt: str, metadata: dict[str, Any], weight: float) -> float:
    """Sees everything that a grader may see."""
    assert (prompt, metadata) == ("p", {"k": [1]})
    return weight * float(response == answer)


async def asynchronous(response: str, answer: Any, prompt: str, metadata: dict[str, Any]) -> float:
    """Not a plain function."""
    return 0.0


def number(response: str, answer: Any, prompt: str, metadata: dict[str, Any]) -> float:
    """The response itself."""
    return float(response)


def announce_or_act(response: str, answer: Any, prompt: str, metadata: dict[str, Any]) -> Any:
    """Announce and sleep where the prompt says so."""
    return (announce if prompt == "announce" else act)(response, answer, "", metadata)
