"""JSON lines that a command writes as it goes."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from tailrace.commands.files import check_apart, check_new_file, is_special
from tailrace.errors import UserError


class JsonLines:
    """JSON lines in a new file or on standard output. Each is written at once, so that a killed run leaves whole lines.

    A context manager. It makes the file on entering, once everything else is known to be right. It removes the file on
    leaving where nothing was written.
    """

    def __init__(self, path: Path | None, *, force: bool, inputs: Iterable[str | Path] = ()) -> None:
        """`force`: replace the file at `path`. `inputs`: files, or patterns of them, that are never replaced.

        Raises:
            UserError: the file exists and is not to be replaced, is an input or a directory, or its directory does not
                exist; or it is standard output, which is closed.
        """
        self._path = path = None if path == Path("/dev/stdout") else path
        self._length = 0
        if path is None and sys.stdout is None:
            raise UserError("standard output is closed; give a file with --output FILE")
        if path is not None:
            self._replace = force or is_special(path)  # a device or a pipe has nothing to lose
            if path.is_file():
                check_apart("--output", path, inputs)
            if not is_special(path):
                check_new_file("--output", path, force=force)

    @property
    def on_terminal(self) -> bool:
        """Whether the lines go to a terminal."""
        return self._path is None and sys.stdout.isatty()

    def __enter__(self) -> Self:
        if self._path is None:
            self._file = open(sys.stdout.fileno(), "wb", buffering=0, closefd=False)
            return self
        try:
            self._file = self._path.open("wb" if self._replace else "xb", buffering=0)
        except FileExistsError:  # another process was faster
            raise UserError(f"--output {self._path} was just made by another process; give another file") from None
        except OSError as error:
            raise UserError(f"--output {self._path} cannot be made: {error.strerror}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if self._path is not None and self._path.is_file() and not self._length:
            self._path.unlink()

    def write(self, line: msgspec.Struct) -> None:
        """Write a line, whole or not at all.

        Raises:
            UserError: there is no room for the line, or its reader is gone.
        """
        left = memoryview(msgspec.json.encode(line) + b"\n")
        size = len(left)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            if self._path is not None and self._path.is_file():
                os.truncate(self._path, self._length)
            raise UserError(f"{self._path or 'standard output'} cannot be written: {error.strerror}") from None
        self._length += size
