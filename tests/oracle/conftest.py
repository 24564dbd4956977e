"""The independent implementation, verl, and the JSON line of what was found, with which `make test-oracle` ends."""

import importlib
import importlib.util
import json
from collections.abc import Callable, Generator
from importlib.metadata import version
from types import ModuleType
from typing import Any

import pytest

from tests.oracle.entry import BAR, Agreement, Entry

FOUND = pytest.StashKey[dict[str, Any]]()


@pytest.fixture(scope="session")
def verl() -> ModuleType:
    """The package `verl.trainer.ppo` with the modules that entries use, which take half a minute to import."""
    if importlib.util.find_spec("verl") is None:
        pytest.skip(
            "verl is not in this environment; make test-oracle has one with it (verl needs Python 3.11 or 3.12)"
        )
    for module in ("core_algos", "rollout_corr_helper"):
        importlib.import_module(f"verl.trainer.ppo.{module}")
    return importlib.import_module("verl.trainer.ppo")


@pytest.fixture
def record(pytestconfig: pytest.Config) -> Callable[[Entry, Agreement], None]:
    """Keeps an agreement for the JSON line."""

    def keep(entry: Entry, found: Agreement) -> None:
        pytestconfig.stash.setdefault(FOUND, {})[entry.name] = found.as_json()

    return keep


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    """Print the line after all that pytest prints."""
    result = yield
    if found := session.config.stash.get(FOUND, None):
        oracle = f"verl {version('verl')}"
        print(json.dumps({"oracle": oracle, "dtype": "float64", "bar": BAR, "largest_difference": found}))
    return result
