"""Parquet files."""

from collections.abc import Iterator
from glob import glob, has_magic
from pathlib import Path
from typing import Any

import polars as pl

from tailrace.config.prompts import ParquetSource
from tailrace.errors import PromptError, one_line
from tailrace.prompts.sources.base import Row, table_rows


def parquet_rows(config: ParquetSource) -> Iterator[Row]:
    """The rows of one file, or of the sorted matches of a glob. Ids are `path:row`, from 0.

    Raises:
        PromptError: no such file, or it is not Parquet.
    """
    return table_rows(_records(_files(config.path)), config)


def _files(path: str) -> list[str]:
    if not has_magic(path):
        return [path]
    files = sorted(glob(path, recursive=True))
    if not files:
        raise PromptError(f"prompts.source.path {path} matches no file")
    return files


def _records(files: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for file in files:
        # A single file goes by its name, which does not change when the data is moved.
        name = file if len(files) > 1 else Path(file).name
        for number, record in enumerate(_read(file).iter_rows(named=True)):
            yield f"{name}:{number}", record


def _read(file: str) -> pl.DataFrame:
    if Path(file).is_dir():
        raise PromptError(f"prompts.source.path {file} is a directory; use a glob such as {Path(file) / '*.parquet'}")
    try:
        return pl.read_parquet(file, glob=False)
    except OSError as error:
        raise PromptError(f"cannot read prompts.source.path {file}: {error.strerror or one_line(error)}") from None
    except pl.exceptions.PolarsError as error:
        raise PromptError(f"prompts.source.path {file} is not a Parquet file: {one_line(error)}") from None
