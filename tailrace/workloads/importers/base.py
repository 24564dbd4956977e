"""An importer reads the files of one format as one trace."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from gzip import BadGzipFile
from gzip import open as open_gzip
from pathlib import Path
from typing import IO, Annotated, TypeVar, cast
from zlib import error as ZlibError

import msgspec

from tailrace.errors import UNREADABLE, TraceError, one_line
from tailrace.workloads.trace import Provenance, Trace

Record = TypeVar("Record", bound=msgspec.Struct)
_MOST = 2**31 - 1
"""The largest number that a trace's columns of tokens and steps hold."""
Count = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]
Length = Annotated[int, msgspec.Meta(ge=1, le=_MOST)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0)]


class Importer(ABC):
    """Reads one format."""

    name: str
    """The name of the format."""

    @abstractmethod
    def reads(self, first: bytes) -> bool:
        """Whether a file that begins with this line is of the format."""

    @abstractmethod
    def read(self, files: Sequence[Path], provenance: Provenance) -> Trace:
        """Read files of one workload, in their order, as one trace. `provenance`: what the caller knows.

        Raises:
            TraceError: a file cannot be read, or a record is not of the format. The message names file, record, field.
        """


def open_text(path: Path) -> IO[bytes]:
    """Open a file, or what is packed in a .gz file."""
    return cast(IO[bytes], open_gzip(path)) if path.suffix == ".gz" else path.open("rb")


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not empty, each with its number, from 1.

    Raises:
        TraceError: the file cannot be read.
    """
    with _readable(path), open_text(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def read_bytes(path: Path) -> bytes:
    """Return all that is in a file.

    Raises:
        TraceError: the file cannot be read.
    """
    with _readable(path), open_text(path) as file:
        return file.read()


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn the errors of reading a file into a TraceError."""
    try:
        yield
    except FileNotFoundError:
        raise TraceError(f"{path} does not exist") from None
    except (OSError, EOFError, ZlibError) as error:
        damaged = ", or is damaged" if isinstance(error, BadGzipFile | EOFError | ZlibError) else ""
        reason = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
        raise TraceError(f"{path} cannot be read{damaged}: {reason}") from None


def fields(line: bytes) -> Set[str]:
    """Return the names of the fields of a JSON record; none where the line is no such record."""
    try:
        record = msgspec.json.decode(line)
    except UNREADABLE:
        return set()
    return record.keys() if isinstance(record, dict) else set()


def records(path: Path, kind: type[Record]) -> Iterator[tuple[int, Record]]:
    """Decode each line as a JSON record of `kind`. Fields that `kind` lacks are passed over.

    Raises:
        TraceError: a line is not such a record.
    """
    decode = msgspec.json.Decoder(kind).decode
    for number, line in lines(path):
        try:
            yield number, decode(line)
        except UNREADABLE as error:
            raise TraceError(f"{path}, record {number}: {one_line(error)}") from None
