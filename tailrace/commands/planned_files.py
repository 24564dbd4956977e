"""The files of a plan: a recipe, and beside it what was foretold, which the recipe names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tailrace.commands.files import check_new_file
from tailrace.commands.foretell import write_foretold
from tailrace.config.overrides import merged
from tailrace.host.whole_file import whole_file
from tailrace.planning.foretold import Foretold


def check_new_plan(output: Path, *, force: bool) -> None:
    """Check that both files can be written; `force` lets them replace existing ones.

    Raises:
        UserError: one exists, or its directory does not.
    """
    check_new_file("--output", output, force=force)  # before a name is made of it, which a directory may lack
    check_new_file("--output", _beside(output), force=force)


def plan_files(output: Path) -> tuple[Path, Path]:
    """The recipe, and what was foretold."""
    return output, _beside(output)


def naming_foretold(values: Mapping[str, Any], output: Path) -> dict[str, Any]:
    """Return a recipe that names what was foretold."""
    return merged(values, {"observe": {"plan": _beside(output).name}})


def write_plan(output: Path, recipe: str, foretold: Foretold) -> None:
    """Write both files."""
    write_foretold(_beside(output), foretold)
    write_text(output, recipe)


def write_text(path: Path, text: str) -> None:
    """Write a file as a whole, or not at all."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def _beside(output: Path) -> Path:
    return output.with_suffix(".plan.json")
