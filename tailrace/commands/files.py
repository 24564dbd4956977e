"""Files that a command writes."""

import os
from collections.abc import Iterable
from glob import glob
from pathlib import Path
from tempfile import TemporaryFile

from tailrace.errors import UserError


def check_new_file(option: str, path: Path, *, force: bool) -> None:
    """Check that the file that `option` names can be made, or replaced with `force`.

    Raises:
        UserError: the file exists and is not to be replaced, is a directory, a device or a pipe, or cannot be made in
            its directory.
    """
    if path.is_dir():
        raise UserError(f"{option} {path} is a directory; give a file")
    if is_special(path):
        raise UserError(f"{option} {path} is a device or a pipe, which a file would replace; give a file")
    if os.path.lexists(path) and not force:
        raise UserError(f"{option} {path} exists; give another file, or replace it with --force")
    if not path.parent.is_dir():
        raise UserError(f"{option} {path} cannot be made: {path.parent} is not a directory")
    try:
        TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise UserError(f"{option} {path} cannot be made: {error.strerror}") from None


def is_special(path: Path) -> bool:
    """Whether there is a device, a pipe or a socket at the path."""
    return path.exists() and not path.is_file() and not path.is_dir()


def check_apart(option: str, output: Path, inputs: Iterable[str | Path]) -> None:
    """Check that the file that `option` names, which is to be replaced, is none of the `inputs`: files or patterns.

    Raises:
        UserError: it is one of them.
    """
    for given in map(str, inputs):
        files = (path for path in map(Path, (given, *glob(given, recursive=True))) if path.is_file())
        if any(map(output.samefile, files)):
            raise UserError(f"{option} {output} is an input of this command; give another file")
