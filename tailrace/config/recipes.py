"""The search for a recipe: a file, or one that ships with the package, by its name."""

import logging
from pathlib import Path

from tailrace.errors import ConfigError, nearest
from tailrace.registers import run_files

_SHIPPED = Path(__file__).parents[1] / "recipes"
_SUFFIX = ".yaml"


def shipped_recipes() -> dict[str, Path]:
    """Return the recipes that ship, by name, such as quickstart."""
    return {path.stem: path for path in sorted(_SHIPPED.glob(f"*{_SUFFIX}"))}


def find_recipe(given: Path) -> Path:
    """Return the file that `given` means: itself, otherwise with .yaml at its end, otherwise the shipped recipe of that
    name.

    Raises:
        ConfigError: there is no such file; the message names the nearest one.
    """
    shipped = shipped_recipes().get(_name(given)) if len(given.parts) == 1 else None
    for local in (given, Path(f"{given}{_SUFFIX}")):
        if _is_there(local):
            if shipped is not None and local != given:
                logging.getLogger("tailrace").info("recipe: the file %s, not the one of that name that ships", local)
            return local
    if shipped is not None:
        return shipped
    if given.is_dir():
        raise ConfigError(f"the recipe {given} cannot be read: Is a directory{_run_inside(given)}")
    raise ConfigError(f"the recipe {given} does not exist; {_other(given)}")


def _is_there(path: Path) -> bool:
    """Return whether there is a file. Also True where that cannot be found out, since opening the file then says
    why."""
    try:
        return path.exists() and not path.is_dir()
    except OSError:
        return True


def _name(given: Path) -> str:
    return given.name.removesuffix(_SUFFIX)


def _run_inside(directory: Path) -> str:
    recipe = directory / run_files.CONFIG
    return f"; did you mean {recipe}?" if recipe.is_file() else ""


def _other(missing: Path) -> str:
    """Name the nearest file beside `missing` or shipped recipe, otherwise all recipes that ship."""
    shipped = shipped_recipes()
    known = dict.fromkeys(shipped, "") | {_name(file): str(file) for file in missing.parent.glob(f"*{_SUFFIX}")}
    if close := nearest(_name(missing), known):
        return f"did you mean {known[close] or close}?"
    return f"those that ship are {', '.join(shipped)}"
