"""Traces in files: Parquet for programs, JSON lines for people. The name of the file says which: .parquet or .jsonl.

Both carry the version of the schema and the provenance: Parquet in its metadata, JSON lines in the first line. JSON
lines leave nulls out.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from tailrace.errors import UNREADABLE, TraceError, one_line
from tailrace.host.whole_file import whole_file
from tailrace.workloads.trace import COLUMNS, FORMAT, Provenance, Trace

HEADER_KEY = "tailrace_trace"
"""The key of the header in the metadata of a Parquet file, and of the schema's version in a header."""


class _Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The beginning of a trace."""

    tailrace_trace: int
    """The version of its schema."""
    provenance: Provenance


def check_name(path: Path) -> None:
    """Check that the name of a file says what is in it.

    Raises:
        TraceError: it ends in neither .parquet nor .jsonl.
    """
    if path.suffix not in (".parquet", ".jsonl"):
        raise TraceError(f"{path} cannot be a trace: give a name that ends in .parquet or .jsonl")


def write_trace(trace: Trace, path: Path) -> None:
    """Write a trace. A file that is there is replaced when the new one is complete.

    Raises:
        TraceError: the name ends in neither .parquet nor .jsonl, or the file cannot be written.
    """
    check_name(path)
    write = _write_parquet if path.suffix == ".parquet" else _write_lines
    try:
        with whole_file(path) as partial:
            write(trace, partial)
    except OSError as error:
        raise TraceError(f"{path} cannot be written: {error.strerror or one_line(error)}") from None


def parquet_of(trace: Trace) -> bytes:
    """Return the content of a .parquet file of the trace."""
    content = BytesIO()
    _write_parquet(trace, content)
    return content.getvalue()


def read_trace(path: Path | str) -> Trace:
    """Read a trace.

    Raises:
        TraceError: there is no such file, it is not a trace, of a later version, damaged, or holds what cannot be.
    """
    path = Path(path)
    if path.is_dir():
        raise TraceError(f"{path} is a directory; write the trace of a run with `tailrace trace export {path}`")
    check_name(path)
    try:
        return _read_parquet(path) if path.suffix == ".parquet" else _read_lines(path)
    except FileNotFoundError:
        raise TraceError(f"{path} does not exist") from None
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or one_line(error)}") from None


def header_line(provenance: Provenance) -> bytes:
    """Write the first line of a .jsonl file."""
    return _header(provenance) + b"\n"


def line_of(sample: Mapping[str, Any]) -> bytes:
    """Write a row of a trace as a line of a .jsonl file."""
    return msgspec.json.encode(_without_nulls(sample)) + b"\n"


def _header(provenance: Provenance) -> bytes:
    return msgspec.json.encode(_Header(tailrace_trace=FORMAT, provenance=provenance))


def _decoded(header: bytes, path: Path) -> Provenance:
    try:
        decoded = msgspec.json.decode(header, type=_Header)
    except UNREADABLE as error:
        raise TraceError(
            f"{path} does not begin as a trace: {one_line(error)}; import what another program wrote with `tailrace "
            "trace import`"
        ) from None
    if decoded.tailrace_trace != FORMAT:
        raise TraceError(
            f"{path} is a trace of version {decoded.tailrace_trace}, and this Tailrace reads {FORMAT}; export it again"
        )
    return decoded.provenance


def _write_parquet(trace: Trace, file: Path | BytesIO) -> None:
    trace.samples.write_parquet(file, compression="zstd", metadata={HEADER_KEY: _header(trace.provenance).decode()})


def _read_parquet(path: Path) -> Trace:
    try:
        header = pl.read_parquet_metadata(path).get(HEADER_KEY, "")
        samples = pl.read_parquet(path, glob=False)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:  # damaged bytes may cause either
        raise TraceError(f"{path} is not a Parquet file, or damaged: {one_line(error)}") from None
    return _named(path, samples, _decoded(header.encode(), path))


def _write_lines(trace: Trace, path: Path) -> None:
    with path.open("wb") as file:
        file.write(header_line(trace.provenance))
        file.writelines(map(line_of, trace.samples.iter_rows(named=True)))


def _without_nulls(value: Any) -> Any:
    match value:
        case dict():
            return {name: _without_nulls(part) for name, part in value.items() if part is not None}
        case list():
            return [_without_nulls(part) for part in value]
    return value


def _read_lines(path: Path) -> Trace:
    with path.open("rb") as file:
        if not (header := file.readline()):
            raise TraceError(f"{path} is empty; a trace has at least a header")
        provenance = _decoded(header, path)
        rows = list(_rows(path, file))
    schema = {name: column.dtype for name, column in COLUMNS.items()}
    try:
        samples = pl.DataFrame(rows, schema=schema)
    except (pl.exceptions.PolarsError, OverflowError) as error:
        why, _, _ = one_line(error).partition(";")  # what follows is advice to programs that call polars
        raise TraceError(f"{path} has a number that is too large for its column: {why}") from None
    return _named(path, samples, provenance)


def _rows(path: Path, lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        try:
            row = msgspec.json.decode(line)
            msgspec.convert(row, _SAMPLE)  # polars would make a number of the text "3"
        except UNREADABLE as error:
            raise TraceError(f"{path}, record {number}, is not a sample: {one_line(error)}") from None
        yield row


def _record(name: str, fields: Mapping[str, Any], required: Collection[str] = ()) -> type[msgspec.Struct]:
    """The struct of a record with columns of these types, of which those that are not required may be left out."""
    needed = [(field, _python_type(kind)) for field, kind in fields.items() if field in required]
    others = [(field, _python_type(kind) | None, None) for field, kind in fields.items() if field not in required]
    return msgspec.defstruct(name, [*needed, *others], forbid_unknown_fields=True)


def _python_type(kind: Any) -> Any:
    if isinstance(kind, pl.List):
        return list[_python_type(kind.inner)]  # type: ignore[misc]
    if isinstance(kind, pl.Struct):
        return _record("Part", {field.name: field.dtype for field in kind.fields})
    return {pl.Int32: int, pl.Int64: int, pl.Float64: float, pl.Boolean: bool, pl.String: str}[kind.base_type()]


_SAMPLE = _record(
    "Sample",
    {name: column.dtype for name, column in COLUMNS.items()},
    [name for name, column in COLUMNS.items() if column.is_required],
)


def _named(path: Path, samples: pl.DataFrame, provenance: Provenance) -> Trace:
    """The trace, with an error that names the file."""
    try:
        return Trace.of(samples, provenance)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
