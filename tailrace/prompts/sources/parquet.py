"""Parquet files."""

from collections.abc import Iterator, Mapping
from glob import glob, has_magic
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from tailrace.config.prompts import ParquetSource
from tailrace.errors import PromptError, one_line
from tailrace.prompts.sources.base import Row, table_rows

_NARROW: Mapping[Any, type[np.floating[Any]]] = {pl.Float16(): np.float16, pl.Float32(): np.float32}


def parquet_rows(config: ParquetSource, key: str) -> Iterator[Row]:
    """Yield the rows of one file, or of the sorted matches of a glob. Ids are `path:row`, from 0.

    `key`: the key of the source in the recipe.

    Raises:
        PromptError: there is no such file, or it is not Parquet.
    """
    files = _files(config.path, key)
    for file in files:
        # A single file goes by its name, which does not change when the data is moved.
        name = file if len(files) > 1 else Path(file).name
        frame = _read(file, key)
        records = ((f"{name}:{number}", record) for number, record in enumerate(frame.iter_rows(named=True)))
        yield from table_rows(records, config, key, narrow=_narrow(frame.schema))


def _files(path: str, key: str) -> list[str]:
    if Path(path).exists() or not has_magic(path):
        return [path]
    files = sorted(glob(path, recursive=True))
    if not files:
        raise PromptError(f"{key}.path {path} matches no file")
    return files


def _read(file: str, key: str) -> pl.DataFrame:
    if Path(file).is_dir():
        raise PromptError(f"{key}.path {file} is a directory; use a glob such as {Path(file) / '*.parquet'}")
    try:
        return pl.read_parquet(file, glob=False)
    except OSError as error:
        raise PromptError(f"cannot read {key}.path {file}: {error.strerror or one_line(error)}") from None
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:  # damaged bytes may cause either
        raise PromptError(f"{key}.path {file} is not a Parquet file, or damaged: {one_line(error)}") from None


def _narrow(columns: Mapping[str, Any], prefix: str = "") -> dict[str, type[np.floating[Any]]]:
    """The narrow floats of a table's columns; see `NarrowFloats`."""
    found: dict[str, type[np.floating[Any]]] = {}
    for name, kind in columns.items():
        if isinstance(kind, pl.Struct):
            found |= _narrow({field.name: field.dtype for field in kind.fields}, f"{prefix}{name}.")
        elif kind in _NARROW:
            found[f"{prefix}{name}"] = _NARROW[kind]
    return found
