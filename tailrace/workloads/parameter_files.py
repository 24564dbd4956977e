"""Parameters of workloads in files: YAML, of which JSON is a part."""

from pathlib import Path
from typing import Any

import msgspec

from tailrace.config.recipe_text import RecipeSyntaxError, read_yaml, write_yaml
from tailrace.errors import TraceError, one_line
from tailrace.host.whole_file import whole_file
from tailrace.workloads.parameters import FORMAT, Parameters

SUFFIXES = (".yaml", ".yml", ".json")
_DIGITS = 5
"""Significant digits of a number in a file; a fit is not as exact."""


def read_parameters(path: Path) -> Parameters:
    """Read the parameters of a workload.

    Raises:
        TraceError: there is no such file, or it is not the parameters of a workload of this version.
    """
    try:
        values = read_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TraceError(f"{path} does not exist") from None
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or one_line(error)}") from None
    except (RecipeSyntaxError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} is not YAML: {one_line(error)}") from None
    version = values.get("tailrace_workload") if isinstance(values, dict) else None
    if version != FORMAT:
        raise TraceError(
            f"{path} has tailrace_workload {version!r}; expected {FORMAT}, as `tailrace trace fit` writes it"
        )
    try:
        return msgspec.convert(values, Parameters)
    except msgspec.ValidationError as error:
        raise TraceError(f"{path} has no valid parameters: {one_line(error)}") from None


def write_parameters(parameters: Parameters, path: Path) -> None:
    """Write the parameters of a workload. A file that is there is replaced when the new one is complete.

    Raises:
        TraceError: the file cannot be written.
    """
    text = write_yaml(_rounded(msgspec.to_builtins(parameters)), leaves_in_line=True)
    try:
        with whole_file(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TraceError(f"{path} cannot be written: {error.strerror or one_line(error)}") from None


def _rounded(value: Any) -> Any:
    match value:
        case float():
            return float(f"{value:.{_DIGITS}g}")
        case dict():
            return {name: _rounded(part) for name, part in value.items()}
        case list() | tuple():
            return [_rounded(part) for part in value]
    return value
