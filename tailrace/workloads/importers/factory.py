"""The importers by the names of their formats, and the one of a file."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tailrace.errors import TraceError, did_you_mean
from tailrace.workloads.files import HEADER_KEY
from tailrace.workloads.importers.base import Importer, fields, lines
from tailrace.workloads.importers.groups import Groups
from tailrace.workloads.importers.polytrace import PolyTrace
from tailrace.workloads.importers.polytrace_fits import Mathematics, ToolUse
from tailrace.workloads.importers.servegen import ServeGen
from tailrace.workloads.importers.services import Azure, Mooncake
from tailrace.workloads.trace import Provenance, Trace

IMPORTERS: Mapping[str, Importer] = {
    importer.name: importer
    for importer in (PolyTrace(), Groups(), Azure(), Mooncake(), ServeGen(), Mathematics(), ToolUse())
}


def import_trace(files: Sequence[Path], provenance: Provenance, *, format: str | None = None) -> Trace:
    """Read files of others as one trace. Without `format`, the first line of a file tells it.

    Raises:
        TraceError: there is no file, the format is unknown, or a file is not of it.
    """
    if not files:
        raise TraceError("there is no file to import; name one or more")
    if format is not None and format not in IMPORTERS:
        raise TraceError(f"format {format!r} is none of {', '.join(IMPORTERS)}{did_you_mean(format, IMPORTERS)}")
    importer = _importer_of(files) if format is None else IMPORTERS[format]
    return importer.read(files, provenance)


def _importer_of(files: Sequence[Path]) -> Importer:
    """The importer of the first file whose first line tells its format; of some formats only one file does."""
    for file in files:
        first = next((line for _, line in lines(file)), None)
        if first is None:
            raise TraceError(f"{file} is empty; a trace needs at least one sample")
        if HEADER_KEY in fields(first):
            raise TraceError(f"{file} is a trace of Tailrace already; give it to a command as it is")
        if first.startswith(b"PAR1"):
            raise TraceError(f"{file} is a Parquet file, as no format is; a trace of Tailrace needs no import")
        for importer in IMPORTERS.values():
            if importer.reads(first):
                return importer
    raise TraceError(f"{files[0]} does not begin as one of {', '.join(IMPORTERS)}; name its format with --format")
