"""Where Tailrace keeps what it would have to make again: converted models, compiled kernels."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """$TAILRACE_CACHE, or `tailrace` in $XDG_CACHE_HOME or in ~/.cache."""
    if own := os.environ.get("TAILRACE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "tailrace"
