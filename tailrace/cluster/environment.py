"""The environment of processes that are started here."""

import os
import site
from collections.abc import Mapping
from pathlib import Path

import tailrace


def environment(here: Mapping[str, str]) -> dict[str, str]:
    """`here` without Ray's part, and with this installation of Tailrace importable."""
    root = str(Path(tailrace.__file__).parents[1])
    paths = [path for path in here.get("PYTHONPATH", "").split(os.pathsep) if path]
    if root not in (*site.getsitepackages(), *paths):
        paths.append(root)  # it runs from its sources
    ours = {name: value for name, value in here.items() if not name.startswith("RAY_")}
    return ours | {"PYTHONPATH": os.pathsep.join(paths)}
