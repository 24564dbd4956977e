"""Models with random weights, and what stands for them in checks."""

import json
from pathlib import Path
from typing import Any

import pytest

from tailrace.errors import ModelError
from tailrace.models.info import describe_model
from tailrace.models.loading import check_model
from tailrace.models.random import random_model, weightless_model
from tailrace.models.tokenizer import load_tokenizer
from tests.conftest import TinyModel


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TAILRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_what_stands_for_a_model_is_of_its_sizes_and_takes_no_room(
    tmp_path: Path, tiny_model: TinyModel, cache: Path, family: str
) -> None:
    (tmp_path / "empty").mkdir()
    stand_in = weightless_model(tiny_model(family), tmp_path / "empty")
    assert not cache.exists()
    check_model(stand_in)
    model = random_model(tiny_model(family))
    assert describe_model(stand_in) == describe_model(model)
    assert load_tokenizer(stand_in).get_vocab() == load_tokenizer(model).get_vocab()
    weights = (stand_in / "model.safetensors").stat()
    assert weights.st_size > describe_model(model).bytes > 1.5 * 512 * weights.st_blocks


@pytest.mark.parametrize("file", ["config.json", ""])
def test_an_architecture_is_a_file_or_its_directory(tmp_path: Path, tiny_model: TinyModel, file: str) -> None:
    assert (random_model(tiny_model("llama") / file) / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "holds .*; expected a JSON object"),
        ({"hidden_size": "abc"}, "does not fit: Expected `int`, got `str`"),
        ({"initializer_range": "abc"}, "transformers cannot read .*initializer_range"),
        ({"model_type": "bert"}, "is of a model of family 'bert'"),
    ],
)
def test_what_is_not_the_configuration_of_a_model_is_said_in_one_line(
    tmp_path: Path, tiny_model: TinyModel, cache: Path, content: Any, message: str
) -> None:
    config = tmp_path / "config.json"
    right = json.loads((tiny_model("llama") / "config.json").read_text())
    config.write_text(content if isinstance(content, str) else json.dumps(right | content))
    (tmp_path / "empty").mkdir()
    for make in (random_model, lambda path: weightless_model(path, tmp_path / "empty")):
        with pytest.raises(ModelError, match=message) as error:
            make(config)
        assert str(config) in str(error.value)
        assert "\n" not in str(error.value)
    assert not cache.exists()
