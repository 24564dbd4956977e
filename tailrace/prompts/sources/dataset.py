"""Data sets of the library `datasets`: a directory on disk, or the hub."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from tailrace.config.prompts import DatasetSource, HubSource
from tailrace.errors import PromptError, did_you_mean, one_line
from tailrace.prompts.sources.base import Row, table_rows

_NARROW: Mapping[str, type[np.floating[Any]]] = {"float16": np.float16, "float32": np.float32}


def dataset_rows(config: DatasetSource, key: str) -> Iterator[Row]:
    """The rows of a directory written by `save_to_disk`. Ids are `split:row`, from 0.

    `key`: the key of the source in the recipe.

    Raises:
        PromptError: there is no such directory or split, or `datasets` is not installed.
    """
    datasets = _library(key)
    path = Path(config.path)
    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise PromptError(f"cannot load {key}.path {path}: {one_line(error)}") from None
    split, dataset = _pick_split(loaded, config, key)
    return table_rows(_records(split, dataset), config, key, narrow=_narrow(dataset.features))


def hub_rows(config: HubSource, key: str) -> Iterator[Row]:
    """The rows of a split of a data set of the hub. Ids are `split:row`, from 0.

    `key`: the key of the source in the recipe.

    Raises:
        PromptError: the hub cannot be reached, or has no such data set, or `datasets` is not installed.
    """
    datasets = _library(key)
    try:
        dataset = datasets.load_dataset(config.name, config.subset, split=config.split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise PromptError(
            f"cannot load split {config.split!r} of {key}.name {config.name!r} from the hub: {one_line(error)}"
        ) from None
    return table_rows(_records(config.split, dataset), config, key, narrow=_narrow(dataset.features))


def _library(key: str) -> ModuleType:
    try:
        import datasets  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise PromptError(f"this {key} needs the library datasets: pip install 'tailrace[datasets]'") from None
    module: ModuleType = datasets
    return module


def _pick_split(loaded: Any, config: DatasetSource, key: str) -> tuple[str, Any]:
    """Choose a split of a directory, which holds one data set, or a mapping from split names to data sets."""
    if not isinstance(loaded, dict):
        name = str(loaded.split or "row")
        if config.split not in (None, name):
            raise PromptError(f"{config.path} holds one data set without splits; remove {key}.split")
        return name, loaded
    if config.split is None and len(loaded) == 1:
        return next(iter(loaded.items()))
    if config.split is None or config.split not in loaded:
        asked = "is needed" if config.split is None else f"{config.split!r} is not there"
        hint = did_you_mean(config.split or "", loaded)
        raise PromptError(f"{key}.split {asked}: {config.path} has {', '.join(loaded)}{hint}")
    return config.split, loaded[config.split]


def _narrow(features: Mapping[str, Any], prefix: str = "") -> dict[str, type[np.floating[Any]]]:
    """The narrow floats of a data set's features; see `NarrowFloats`."""
    found: dict[str, type[np.floating[Any]]] = {}
    for name, feature in features.items():
        if isinstance(feature, Mapping):
            found |= _narrow(feature, f"{prefix}{name}.")
        elif kind := _NARROW.get(getattr(feature, "dtype", "")):
            found[f"{prefix}{name}"] = kind
    return found


def _records(split: str, dataset: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, record in enumerate(dataset):
        yield f"{split}:{number}", record
