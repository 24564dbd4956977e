"""ServeGen's clients of a service (alibaba/ServeGen, arXiv 2505.09999): two files for each client.

    NAME-trace.csv      600 s a line: start, requests/s, variation, family of the gaps between requests, shape, scale
    NAME-dataset.json   by the start of a window: shares of input_tokens and output_tokens, as texts: "{9: 0.0003}"

They hold rates and distributions, and no requests. So the requests are drawn, with a fixed seed: as many as the rate
says, with gaps of the family, and with lengths of the window. The two lengths of a request are independent, as ServeGen
says nothing of pairs. A service has no steps (see `services`).
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import polars as pl

from tailrace.errors import UNREADABLE, TraceError, one_line
from tailrace.workloads.importers.base import Importer, Length, Seconds, lines, read_bytes
from tailrace.workloads.importers.services import REQUEST, as_service
from tailrace.workloads.marginals.base import Array
from tailrace.workloads.trace import Provenance, Trace

_TRACE, _DATASET, _PACKED = "-trace.csv", "-dataset.json", ".gz"
_LINE_S = 600.0
_SEED = 0


class _Line(msgspec.Struct):
    """A line of a trace. The scale is that of the rate, and the variation that of the shape."""

    start: Seconds
    rate: Annotated[float, msgspec.Meta(ge=0.0, le=1e4)]
    variation: str
    family: str
    shape: Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]
    scale: str


class _Window(msgspec.Struct):
    """The distributions of a window, from its start to the next one."""

    input_tokens: str
    output_tokens: str


class ServeGen(Importer):
    """Reads clients of ServeGen, all of them as one service."""

    name = "servegen"

    def reads(self, first: bytes) -> bool:
        """See `Importer`. The first line of a dataset does not tell what it is."""
        try:
            _line(first, "")
        except TraceError:
            return False
        return True

    def read(self, files: Sequence[Path], provenance: Provenance) -> Trace:
        """See `Importer`."""
        random = np.random.default_rng(_SEED)
        frames = [frame for trace, dataset in _clients(files) for frame in _requests(trace, dataset, random)]
        if not frames:
            raise TraceError(f"{files[0]} has no requests; give a client that is not idle all day")
        return as_service(pl.concat(frames), provenance)


def _clients(files: Sequence[Path]) -> Iterator[tuple[Path, Path]]:
    """Yield the two files of each client, which lie side by side."""
    for file in files:
        name = file.name.removesuffix(_PACKED)
        client = name.removesuffix(_TRACE).removesuffix(_DATASET)
        if client == name:
            raise TraceError(f"{file} is named neither NAME{_TRACE} nor NAME{_DATASET}, as ServeGen's files are")
        trace, dataset = (_beside(file, f"{client}{kind}", files) for kind in (_TRACE, _DATASET))
        if file == trace:
            yield trace, dataset


def _beside(file: Path, name: str, files: Sequence[Path]) -> Path:
    """The file of this name beside another, or its packed form, which has to be among those that are given."""
    for path in (file.with_name(name), file.with_name(f"{name}{_PACKED}")):
        if path in files:
            return path
    raise TraceError(f"{file} needs {name} beside it; give both files of a client")


def _requests(trace: Path, dataset: Path, random: np.random.Generator) -> Iterator[pl.DataFrame]:
    """Yield the requests of each line of a client's trace."""
    windows, due = _windows(dataset), 0.0
    for number, text in lines(trace):
        where = f"{trace}, record {number}"
        line = _line(text, where)
        before, due = round(due), due + line.rate * _LINE_S  # a part of a request goes on to the next line
        count = round(due) - before
        if not count:
            continue
        start = max((start for start in windows if start <= line.start), default=None)
        if start is None or not all(len(values) for values, _ in windows[start]):
            raise TraceError(f"{where}: the rate is {line.rate:g} at {line.start:g} s, where {dataset} has no lengths")
        columns = {"start": line.start + _LINE_S * _arrivals(line, count, random)}
        for name, (values, shares) in zip(("prompt_tokens", "response_tokens"), windows[start], strict=True):
            columns[name] = random.choice(values, count, p=shares)
        yield pl.DataFrame(columns, schema_overrides=REQUEST)


def _line(text: bytes, where: str) -> _Line:
    fields = text.decode(errors="replace").strip().split(",")
    names = _Line.__struct_fields__
    if len(fields) != len(names):
        raise TraceError(f"{where}, has {len(fields)} fields; expected {', '.join(names)}")
    try:
        line = msgspec.convert(dict(zip(names, fields, strict=True)), _Line, strict=False)
    except msgspec.ValidationError as error:
        raise TraceError(f"{where}: {one_line(error)}") from None
    if line.family not in ("", "Gamma", "Weibull"):
        raise TraceError(f"{where}: the family is {line.family!r}; expected Gamma or Weibull")
    return line


def _arrivals(line: _Line, count: int, random: np.random.Generator) -> Array:
    """Draw when requests come, as shares of the line's time. Without a family any time is as likely."""
    match line.family:
        case "Gamma":
            gaps = random.gamma(line.shape, size=count + 1)
        case "Weibull":
            gaps = random.weibull(line.shape, size=count + 1)
        case _:
            gaps = random.exponential(size=count + 1)
    total = gaps.sum()
    return np.cumsum(gaps)[:-1] / total if total else np.zeros(count)


_Lengths = tuple[Array, Array]
"""Tokens, and the share of each."""


def _windows(dataset: Path) -> Mapping[float, tuple[_Lengths, _Lengths]]:
    """Return the lengths of prompts and responses by the start of their window; empty for an idle one."""
    try:
        windows = msgspec.json.decode(read_bytes(dataset), type=dict[str, _Window])
        starts = msgspec.convert(list(windows), list[Seconds], strict=False)
    except UNREADABLE as error:
        raise TraceError(f"{dataset}: {one_line(error)}") from None
    return {
        start: (
            _lengths(window.input_tokens, f"{dataset}, window {name}, input_tokens"),
            _lengths(window.output_tokens, f"{dataset}, window {name}, output_tokens"),
        )
        for start, (name, window) in zip(starts, windows.items(), strict=True)
    }


def _lengths(text: str, where: str) -> _Lengths:
    """Parse a text such as "{9: 0.25, 10: 0.75}"."""
    if not (text.startswith("{") and text.endswith("}")):
        raise TraceError(f"{where}, is no text such as '{{9: 0.25, 10: 0.75}}'")
    pairs = [pair.partition(":") for pair in text[1:-1].split(",") if text != "{}"]
    try:
        tokens = msgspec.convert([key.strip() for key, _, _ in pairs], list[Length], strict=False)
        shares = msgspec.convert([share.strip() for _, _, share in pairs], list[Seconds], strict=False)
    except msgspec.ValidationError as error:
        raise TraceError(f"{where}: {one_line(error)}") from None
    total = sum(shares)
    if pairs and not abs(total - 1) < 1e-3:
        raise TraceError(f"{where}: the shares add up to {total:g}; expected 1")
    return np.array(tokens, np.float64), np.array(shares) / (total or 1)
