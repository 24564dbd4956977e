"""The cache of files that Tailrace would otherwise make again: converted models, compiled kernels."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


def cache_directory() -> Path:
    """The directory of the cache: $TAILRACE_CACHE, or `tailrace` in $XDG_CACHE_HOME or in ~/.cache."""
    if own := os.environ.get("TAILRACE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "tailrace"


def make_private(directory: Path) -> None:
    """Make `directory` and its missing parents so that no other user can enter them, whatever the umask is.

    Files in the cache are run as code. An existing directory keeps its mode: it may be shared on purpose.
    """
    if not directory.is_dir():
        make_private(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock on the file `path`. Wait as long as another process holds it; a dead process holds none."""
    with path.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
