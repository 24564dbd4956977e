"""The workload of a name or a file, and the library that ships."""

from pathlib import Path

from tailrace.config.base import path_of
from tailrace.errors import TraceError, did_you_mean
from tailrace.workloads.files import read_trace
from tailrace.workloads.parameter_files import SUFFIXES, read_parameters
from tailrace.workloads.parameters import Parameters
from tailrace.workloads.samplers.base import Workload
from tailrace.workloads.samplers.fitted import Fitted
from tailrace.workloads.samplers.recorded import Recorded

_LIBRARY = Path(__file__).parents[1] / "library"


def library() -> dict[str, Parameters]:
    """Return the workloads that ship, by name."""
    return {path.stem: read_parameters(path) for path in sorted(_LIBRARY.glob("*.yaml"))}


def open_workload(name_or_path: str) -> Workload:
    """Open a workload of the library by its name, a file of parameters (.yaml, .json), or a trace (.parquet, .jsonl).

    A trace is drawn from group by group (`Recorded`), parameters sample by sample (`Fitted`).

    Raises:
        TraceError: there is no such workload, or its file cannot be read.
    """
    path = path_of(name_or_path, "the workload", TraceError)
    if path.suffix in SUFFIXES:
        return Fitted(read_parameters(path))
    if path.suffix in (".parquet", ".jsonl"):
        return Recorded(read_trace(path))
    names = [shipped.stem for shipped in sorted(_LIBRARY.glob("*.yaml"))]
    if name_or_path not in names:
        raise TraceError(
            f"workload {name_or_path!r} is none of {', '.join(names)}, and no .yaml, .json, .parquet or .jsonl file"
            f"{did_you_mean(name_or_path, names)}"
        )
    return Fitted(read_parameters(_LIBRARY / f"{name_or_path}.yaml"))
