"""What all tests of benchmarks use."""

from pathlib import Path

import pytest

from tests.conftest import TinyModel
from tests.helpers.bench import write_recipe


@pytest.fixture
def recipe(tmp_path: Path, tiny_model: TinyModel) -> Path:
    """See `write_recipe`."""
    return write_recipe(tmp_path, tiny_model)
