"""Checkpoints that are either complete or absent.

A checkpoint is a directory `step_000012`. It is written beside its final place under a temporary name, described by
`manifest.json`, forced to disk and then renamed, which is one step for the file system. An interrupted save leaves the
checkpoint before it untouched, and a hidden directory. The next save removes that, or the run's next start or end. When
a step is saved again, its old checkpoint first moves to a hidden name, where it counts until the new one is there.

A directory that cannot be removed stays hidden until the next save tries again; on NFS, for example, a process may have
a file of it open. All hidden directories have different names, so none of them is in the way of a save.

A run that goes on from an older checkpoint leaves later ones behind. They are marked, and stay until it saves its own.

The figures of an evaluation of a checkpoint's weights stand in it, since they decide which one is the best and is kept.
They come later than the checkpoint, so the manifest does not name them.
"""

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from safetensors import SafetensorError

from tailrace.errors import UNREADABLE, CheckpointError, quoted
from tailrace.host.whole_file import whole_file

_log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
EVALUATION = "evaluation.json"
"""The figures of an evaluation, by the names that they have in TensorBoard."""
READ_BYTES = 2**22
_TEMPORARY = ".partial-"
_REPLACED = ".replaced-"
_LEFT_BEHIND = ".left-behind"
"""Marker file in a checkpoint that its run has left behind."""
_NAME = re.compile(rf"(?:{re.escape(_REPLACED)})?step_(\d{{6,}})")
_ERROR_NUMBER = re.compile(r"os error (\d+)")
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Entry(msgspec.Struct, frozen=True):
    size: int
    crc32: int


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, directory: Path, keep: int, keep_best: str | None = None) -> None:
        """`keep`: the number of checkpoints that remain after a save, including the new one.

        `keep_best`: a figure of evaluations. The checkpoint with the highest one remains, too.
        """
        self.directory = directory
        self.keep = keep
        self.keep_best = keep_best

    def list(self) -> list[Path]:
        """The complete checkpoints, oldest first."""
        if not self.directory.is_dir():
            return []
        found = [path for path in self.directory.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
        by_step = {step_of(path): path for path in sorted(found)}  # a ".replaced-…" gives way to its successor
        return [by_step[step] for step in sorted(by_step)]

    def of_run(self) -> Sequence[Path]:
        """The complete checkpoints that the run has not left behind, oldest first."""
        return [path for path in self.list() if not _is_left_behind(path)]

    def latest(self) -> Path | None:
        """The newest complete checkpoint of the run."""
        return next(reversed(self.of_run()), None)

    def go_on_from(self, start: Path | None) -> None:
        """Leave behind the checkpoints after `start`; all of them where that is None or from elsewhere.

        If the run ends before its first save, `latest` is then not of an attempt that it has left.

        Raises:
            CheckpointError: they cannot be marked.
        """
        try:
            own = next((path for path in self.list() if start is not None and path.samefile(start)), None)
            for path in self.list():
                if own is None or step_of(path) > step_of(own):
                    (path / _LEFT_BEHIND).touch()
            if own is not None:
                (own / _LEFT_BEHIND).unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"checkpoints that the run leaves behind cannot be marked: {error}") from error
        self.tidy()

    def tidy(self) -> None:
        """Remove the leftovers of saves that a crash ended. Only call this while nothing is being saved."""
        remove_leftovers(self.directory)

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Let `write` fill an empty directory and make it the checkpoint of `step`; then delete those not to be kept.

        Checkpoints that the run has left behind, and those of this and of later steps, go with the first save.

        Raises:
            CheckpointError: it could not be written; the earlier ones are intact.
        """
        path = self._path(step)
        self.tidy()
        with new_directory(path, otherwise=self._otherwise()) as partial:
            write(partial)
            _write_manifest(partial)
        kept = self._kept([old for old in self.of_run() if step_of(old) <= step])
        for old in self.list():
            if old not in kept:
                _remove(old)
        return path

    def note_evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        """Note the figures of an evaluation in the checkpoint of its weights, if there is one; delete the best before.

        Raises:
            CheckpointError: they cannot be written.
        """
        path = self._path(step)
        if not path.is_dir():
            return
        try:
            with whole_file(path / EVALUATION) as partial:
                partial.write_bytes(msgspec.json.format(msgspec.json.encode(figures)))
        except OSError as error:
            raise CheckpointError(f"{path / EVALUATION} cannot be written: {error}") from error
        own = self.of_run()
        kept = self._kept(own)
        for old in own:
            if old not in kept:
                _remove(old)

    def best(self) -> tuple[Path, float] | None:
        """The checkpoint of the run with the highest `keep_best`, and this figure; None where none has it.

        The newest of several equal ones is the best.
        """
        figures = {path: _evaluation(path).get(self.keep_best or "") for path in self.of_run()}
        known = {path: figure for path, figure in figures.items() if figure is not None}
        return max(known.items(), key=lambda entry: (entry[1], step_of(entry[0])), default=None)

    def _path(self, step: int) -> Path:
        return self.directory / f"step_{step:06d}"

    def _kept(self, paths: Sequence[Path]) -> Collection[Path]:
        """Those that are kept of `paths`, which are in the order of their steps, and the best of the run."""
        best = self.best()
        return {*paths[-self.keep :], *([best[0]] if best else [])}

    def verify(self, path: Path) -> None:
        """Check every file of a checkpoint against its manifest.

        Raises:
            CheckpointError: it is not a checkpoint, or a file is missing, short or altered. The message names the
                newest other checkpoint that is intact.
        """
        if not path.is_dir():
            raise CheckpointError(f"{path} is not a directory; {self._otherwise()}")
        if problem := find_damage(path):
            raise CheckpointError(f"checkpoint {path} is damaged: {problem}; {self._fallback(path)}")

    def _otherwise(self) -> str:
        latest = self.latest()
        return f"the newest checkpoint is {latest}" if latest else f"the run has no checkpoint in {self.directory}"

    def _fallback(self, damaged: Path) -> str:
        own_last = sorted(self.list(), key=_is_left_behind, reverse=True)
        others = [path for path in own_last if path.name != damaged.name]
        intact = next((path for path in reversed(others) if not find_damage(path)), None)
        if intact is None:
            return f"{self.directory} holds no intact one, so the run must start again"
        return f"resume from {intact}"


@contextlib.contextmanager
def new_directory(path: Path, *, otherwise: str = "nothing was written") -> Iterator[Path]:
    """Yield an empty directory that becomes `path`, on disk and complete, when the block ends without an error.

    An existing `path` is replaced. Leftovers of blocks for it that a crash ended are removed first, where that is
    possible.

    Args:
        path: the directory to make.
        otherwise: the part of the error message that says what the user still has.

    Raises:
        CheckpointError: the operating system refused to write, for example because the disk is full.
    """
    partial = _temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent, path.name)
        partial.mkdir()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}; {otherwise}") from error
    try:
        yield partial
        _force_to_disk(partial)
        _replace(partial, path)
    except (OSError, SafetensorError) as error:
        written = sum(file.stat().st_size for file in _files(partial))
        _remove(partial)
        raise CheckpointError(f"{path} cannot be written: {_why(error, path, written)}; {otherwise}") from error
    except BaseException:
        _remove(partial)
        raise


def find_damage(directory: Path) -> str | None:
    """The damage of a checkpoint's files as a phrase; None where they are intact."""
    try:
        entries = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=dict[str, _Entry])
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, *UNREADABLE) as error:
        return f"{MANIFEST} is not readable ({error})"
    if not entries:
        return f"{MANIFEST} names no files"
    if outside := [name for name in entries if name.startswith("/") or "\0" in name or ".." in Path(name).parts]:
        return f"{MANIFEST} names {quoted(outside[0])}, which is not in the checkpoint"
    return next((found for name, entry in entries.items() if (found := _file_problem(directory / name, entry))), None)


def remove_leftovers(parent: Path, name: str | None = None) -> None:
    """Remove the leftovers of blocks that a crash ended: unfinished directories, and replaced ones with a successor.

    `name`: of the directory that they were for; by default they are of any, so that nothing may be written there now.
    """
    for path in list(parent.iterdir() if parent.is_dir() else ()):
        if path.name.startswith(_TEMPORARY):
            own, _, _ = path.name.removeprefix(_TEMPORARY).rpartition("-")
            if name in (None, own):
                _remove(path)
        elif path.name.startswith(_REPLACED):
            own = path.name.removeprefix(_REPLACED)
            if name in (None, own) and path.with_name(own).exists():
                _remove(path)


def _temporary(path: Path) -> Path:
    """An unused hidden name beside `path`."""
    return path.with_name(f"{_TEMPORARY}{path.name}-{secrets.token_hex(4)}")


def _remove(path: Path) -> None:
    """Delete an unneeded directory. A crash in the middle leaves a hidden one, not a damaged checkpoint.

    A directory that cannot be deleted gives a warning and no error: the save itself has succeeded.
    """
    try:
        if not path.name.startswith(_TEMPORARY):
            path = path.rename(_temporary(path))
        shutil.rmtree(path)
    except FileNotFoundError:
        pass  # it was renamed to become a checkpoint, or another process removes it
    except OSError as error:
        _log.warning("%s cannot be removed now: %s", path, error)


def _why(error: OSError | SafetensorError, path: Path, written: int) -> str:
    number = _error_number(error)
    if number not in _DISK_FULL:
        return str(error)
    free = shutil.disk_usage(path.parent).free
    return (
        f"{os.strerror(number)} after {_mib(written)} (now {_mib(free)} are free "
        f"on the disk of {path.parent}); free some space"
    )


def _error_number(error: OSError | SafetensorError) -> int:
    """The error's errno, or 0. A SafetensorError has the system's error number in its text."""
    if isinstance(error, OSError):
        return error.errno or 0
    match = _ERROR_NUMBER.search(str(error))
    return int(match[1]) if match else 0


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def _replace(partial: Path, path: Path) -> None:
    """Put `partial` in the place of `path`. A crash between the two renames leaves the old one as `.replaced-…`."""
    replaced = path.with_name(_REPLACED + path.name)
    if path.exists():
        path.rename(replaced)
    try:
        partial.rename(path)
    except OSError:
        if replaced.exists():
            replaced.rename(path)
        raise
    _sync(path.parent)
    if replaced.exists():
        _remove(replaced)


def _force_to_disk(directory: Path) -> None:
    for file in _files(directory):
        _sync(file)
    for folder, _, _ in os.walk(directory):
        _sync(Path(folder))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _evaluation(path: Path) -> dict[str, float]:
    """The figures of the evaluation of a checkpoint's weights; empty where there was none, or its file is broken."""
    try:
        return msgspec.json.decode((path / EVALUATION).read_bytes(), type=dict[str, float])
    except (OSError, *UNREADABLE):
        return {}


def _is_left_behind(path: Path) -> bool:
    return (path / _LEFT_BEHIND).exists()


def step_of(path: Path) -> int:
    """The step of a checkpoint of a store."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _write_manifest(directory: Path) -> None:
    entries = {
        path.relative_to(directory).as_posix(): _Entry(path.stat().st_size, _checksum(path))
        for path in _files(directory)
    }
    (directory / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(entries)))


def _file_problem(path: Path, entry: _Entry) -> str | None:
    if not path.is_file():
        return f"{path.name} ({entry.size} bytes) is missing"
    size = path.stat().st_size
    if size != entry.size:
        return f"{path.name} has {size} bytes, expected {entry.size}"
    try:
        altered = _checksum(path) != entry.crc32
    except OSError as error:
        return f"{path.name} is not readable ({error})"
    return f"{path.name} has been altered: its checksum differs from that in {MANIFEST}" if altered else None
