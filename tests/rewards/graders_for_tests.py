"""Graders that a pool must survive, and graders that cannot be made."""

import asyncio
import ctypes
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NOT_CALLABLE = 3


def _numpy() -> Any:
    """NumPy, which takes as long to import as all else of a grading process."""
    import numpy

    return numpy


def act(response: str, answer: Any, prompt: str, metadata: dict[str, Any]) -> Any:
    """Do as the response says."""
    return DEEDS.get(response, lambda: 0.5)()


def loop() -> None:
    """Loop without end."""
    while True:
        pass


def shout() -> float:
    """Print more than both output streams hold."""
    print("x" * 1_000_000, flush=True)
    print("y" * 1_000_000, file=sys.stderr, flush=True)
    os.write(1, b"\x00" * 100_000)
    return 1.0


def die_with_last_words() -> None:
    """Print a reason and die."""
    print("the disk is full", flush=True)
    os._exit(5)


def fail_at_length() -> None:
    """Raise an error with a message of two megabytes in a million lines."""
    raise ValueError("z\n" * 1_000_000)


class Text(str):
    """A text that claims to be another."""

    def __str__(self) -> str:
        return "1.0"


class Raises(float):
    """A number that cannot be converted."""

    def __float__(self) -> float:
        raise KeyError("no number")


class Mute(Exception):
    """An error whose text raises an error itself."""

    def __str__(self) -> str:
        return str(1 / 0)


def throw(error: BaseException) -> None:
    """Raise `error`."""
    raise error


def recurse() -> None:
    """Recurse without end."""
    recurse()


async def later() -> float:
    """A grader whose call gives a coroutine, not a number."""
    return 1.0


def say() -> float:
    """Print to both streams."""
    print("first", flush=True)
    print("\x1b[31mred", file=sys.stderr, flush=True)
    print("no end", end="", flush=True)
    return 1.0


def fork() -> float:
    """Return twice, once in each of two processes."""
    os.fork()
    return 0.25


_FORKING = multiprocessing.get_context("fork")


def _answer(connection: Any) -> None:
    connection.send(0.75)


def _ask_another(connection: Any) -> None:
    ours, theirs = _FORKING.Pipe()
    child = _FORKING.Process(target=_answer, args=(theirs,))
    child.start()
    connection.send(ours.recv() if ours.poll(20) else 0.0)
    child.join()


def nested() -> float:
    """Ask a process of a process, as graders of code do."""
    ours, theirs = _FORKING.Pipe()
    child = _FORKING.Process(target=_ask_another, args=(theirs,))
    child.start()
    answer = float(ours.recv()) if ours.poll(20) else 0.0
    child.join()
    return answer


def tensor(*shape: int) -> Any:
    """A tensor of quarters."""
    import torch  # slow: only where one is asked for

    return torch.full(shape, 0.25)


DEEDS: dict[str, Callable[[], Any]] = {
    "loop": loop,
    "hold the lock": lambda: re.match(r"(a+)+$", "a" * 64 + "b"),  # runs in C and never releases the interpreter lock
    "exit": lambda: os._exit(3),
    "sys.exit": lambda: sys.exit(4),
    "crash": lambda: ctypes.string_at(0),
    "print": shout,
    "last words": die_with_last_words,
    "read": lambda: float(len(sys.stdin.read())),
    "divide": lambda: 1 / 0,
    "long error": fail_at_length,
    "close all": lambda: os.closerange(0, 64),
    "signal its group": lambda: os.killpg(0, signal.SIGTERM) or time.sleep(600),  # type: ignore[func-returns-value]
    "fork": fork,
    "nested": nested,
    "half a pair": lambda: {"reward": 1.0, "final_answer": "\ud83d"},
    "a text of NumPy": lambda: {"reward": 1.0, "final_answer": _numpy().str_("7")},
    "say": say,
    "awaitable": later,
    "text of its own kind": lambda: Text("2"),
    "a number that raises": Raises,
    "a huge number": lambda: 10**400,
    "parts": lambda: {"reward": _numpy().float32(0.75), "format": True, "length": -2, "correct": False},
    "no reward": lambda: {"correct": 1},
    "a part of text": lambda: {"reward": 1.0, "why": "it is"},
    "a strange name": lambda: {"reward": 1.0, "a b": 1.0},
    "half correct": lambda: {"reward": 1.0, "correct": 0.5},
    "final answer": lambda: {"reward": 1.0, "final_answer": "7"},
    "final number": lambda: {"reward": 1.0, "final_answer": 7},
    "many parts": lambda: {"reward": 1.0, **{f"p{number}": 1.0 for number in range(1000)}},
    "interrupt": lambda: throw(KeyboardInterrupt()),
    "generator exit": lambda: throw(GeneratorExit()),
    "cancelled": lambda: throw(asyncio.CancelledError()),
    "no text": lambda: throw(Mute()),
    "half a character": lambda: throw(ValueError("\ud800")),
    "recursion": recurse,
    "memory": lambda: bytearray(2**62),
    "nan": lambda: float("nan"),
    "too large": lambda: 1e308,
    "text": lambda: "1.0",
    "none": lambda: None,
    "list": lambda: [1.0],
    "tensor": lambda: tensor(3),
    "no numbers": lambda: _numpy().ones((0, 2)),
    "tensor of one": lambda: tensor(1, 1),
    "scalar": lambda: tensor(),
    "true": lambda: True,
    "numpy's true": lambda: _numpy().True_,
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
    """Die the first time that the path `response` is seen."""
    if not Path(response).exists():
        Path(response).touch()
        os._exit(1)
    return 1.0


def weighted(response: str, answer: Any, prompt: str, metadata: dict[str, Any], weight: float) -> float:
    """Check all that a grader is given, and weigh an equal response."""
    assert (prompt, metadata) == ("p", {"k": [1]})
    return weight * float(response == answer)


def daemonize(response: str, prompt: str) -> Any:
    """Start a program that leaves its session and its parent, write its pid to the file `response`, then act."""
    code = "import os, sys, time\nif os.fork(): os._exit(0)\nos.setsid()\n"
    code += "if os.fork(): os._exit(0)\nopen(sys.argv[1], 'w').write(str(os.getpid()))\ntime.sleep(600)"
    subprocess.run([sys.executable, "-c", code, response], check=True)
    while not (Path(response).exists() and Path(response).read_text()):
        time.sleep(0.005)
    return 1.0 if not prompt else act(prompt, None, "", {})


def number(response: str, answer: Any, prompt: str, metadata: dict[str, Any]) -> float:
    """The response as a number."""
    return float(response)


def announce_or_act(response: str, answer: Any, prompt: str, metadata: dict[str, Any]) -> Any:
    """Announce and sleep if the answer says so, else act."""
    return (announce if prompt == "announce" else act)(response, answer, "", metadata)
