"""Writing a file whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield the path of a file to write, beside `path`. It takes the place of `path` at the end of the block.

    After an error it is removed, and `path` stays as it was.

    Raises:
        OSError: the file cannot take that place, or be removed.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")  # another process may write the same file
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
