"""Where Tailrace keeps what it would have to make again: converted models, compiled kernels."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


def cache_directory() -> Path:
    """$TAILRACE_CACHE, or `tailrace` in $XDG_CACHE_HOME or in ~/.cache."""
    if own := os.environ.get("TAILRACE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "tailrace"


def make_private(directory: Path) -> None:
    """Make `directory` and what is missing above it, so that no other user can enter it, whatever the umask is.

    What lies in the cache is run as code. A directory that is there already keeps its mode: it may be shared on
    purpose.
    """
    if not directory.is_dir():
        make_private(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock that is the file `path`. Waits as long as its holder works; that of a dead process is free."""
    with path.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
