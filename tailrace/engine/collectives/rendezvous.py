"""The rendezvous where the ranks of a replica set up their collective."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tailrace.engine.memory import memory_backed


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A fresh directory that every rank of one replica can reach. Plain data: send it to the worker processes."""

    directory: str

    @property
    def memory(self) -> Path:
        """The file that ranks with shared memory map. It is unlinked once all of them have mapped it."""
        return Path(self.directory, "memory")

    @property
    def store(self) -> Path:
        """The file through which the ranks of a process group find each other."""
        return Path(self.directory, "store")


@contextmanager
def rendezvous(size: int = 0) -> Iterator[Rendezvous]:
    """Make a rendezvous for one set of ranks, which share `size` bytes. Its directory goes when the context ends.

    The driver opens it before it starts the ranks, and leaves it as soon as each of them has its collective. If the
    driver is killed before, the ranks remove the directory. Ranks that are started again need a new rendezvous.
    """
    with tempfile.TemporaryDirectory(prefix="tailrace-", dir=memory_backed(size)) as directory:
        yield Rendezvous(directory)
