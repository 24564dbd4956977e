"""Files that a command writes."""

from pathlib import Path

from tailrace.errors import UserError


def check_new_file(option: str, path: Path, *, force: bool) -> None:
    """Check that the file that `option` names can be made, or replaced with `force`.

    Raises:
        UserError: the file exists and is not to be replaced, is a directory, or its directory does not exist.
    """
    if path.is_dir():
        raise UserError(f"{option} {path} is a directory; give a file")
    if path.exists() and not force:
        raise UserError(f"{option} {path} exists; give another file, or replace it with --force")
    if not path.parent.is_dir():
        raise UserError(f"{option} {path} cannot be made: {path.parent} is not a directory")
