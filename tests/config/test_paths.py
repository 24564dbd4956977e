"""Every path in a recipe is expanded as a shell would expand it."""

import os
import pwd
import re
from pathlib import Path

import pytest

from tailrace.config.base import PathText, expanded, path_text
from tailrace.config.evaluated import evaluated_config
from tailrace.config.generate import GenerateConfig
from tailrace.config.load import load_as, load_config
from tailrace.config.model import ModelConfig
from tailrace.config.prompts import DatasetSource
from tailrace.config.queue_table import ServeConfig
from tailrace.config.recipe_text import write_yaml
from tailrace.config.reference import descriptions
from tailrace.config.run import RunConfig
from tailrace.config.shorthand import source_override
from tailrace.config.transfer import ArenaStorageConfig, RemoteQueueConfig, SpillStorageConfig
from tailrace.config.written import written
from tailrace.errors import ConfigError
from tests.config.test_places import ALL
from tests.config.test_written import BASE

TEXT_KEYS = {
    (place.schema, name): field
    for _, place, _, _ in ALL
    if place.schema
    for name, field in place.schema.model_fields.items()
    if field.annotation in (str, str | None, PathText | None)
}


def test_every_key_of_a_file_or_directory_is_declared_as_a_path() -> None:
    named = {
        (schema, name)
        for schema, name in TEXT_KEYS
        if re.search(r"\b(file|directory|directories)\b", about := descriptions(schema).get(name, ""), re.IGNORECASE)
        and "Dotted path" not in about
        and "working directory is importable" not in about
    }
    declared = {key for key, field in TEXT_KEYS.items() if "expanded" in repr((field.annotation, field.metadata))}
    assert (RunConfig, "output_dir") in declared
    assert (ModelConfig, "path") in declared
    assert named - declared == {(DatasetSource, "split")}
    assert len(declared) >= 9


def test_a_tilde_is_the_home_directory_wherever_a_path_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = load_config(
        BASE,
        ["output_dir=~/runs/x", "model.path='~'", "prompts.source.path=~/data/*.jsonl"],
    )
    assert (config.output_dir, config.model.path) == ("/home/me/runs/x", "/home/me")
    assert written(config)["prompts"]["source"]["path"] == "/home/me/data/*.jsonl"
    table = {"tasks": [{"name": "a", "reads": ["prompt_ids"]}]}
    queue = {"storage": {"type": "spill", "directory": "~/s"}}
    assert load_as(ServeConfig, {"queue": queue, "table": table}).queue.storage.directory == "/home/me/s"  # type: ignore[union-attr]


def test_a_relative_path_stays_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert expanded("runs/./x") == "runs/./x"
    assert expanded("./~x") == "./~x"


def test_another_users_home_is_found() -> None:
    me = pwd.getpwuid(os.getuid())
    assert expanded(f"~{me.pw_name}/x") == f"{me.pw_dir}/x"


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("'~nobody-at-all/x'", "output_dir '~nobody-at-all/x' begins with a user who is not known here"),
        (
            "$HOME/x",
            "output_dir '$HOME/x' begins with a variable, which only a shell replaces; use ~ or ${oc.env:NAME}",
        ),
        ("https://me:secret@host/x", "output_dir is a URL, and has to be a path on this machine; download it first"),
        ("''", "output_dir is '': it should have at least 1 character"),
        ("a/" + "b" * 300, "is too long: names have 255 bytes at most"),
        ("a/" * 3000, "is too long"),
        ('"a\\0b"', "output_dir has the character \\0"),
    ],
)
def test_what_can_be_no_path_is_refused(path: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(BASE, [f"output_dir={path}"])
    assert says in str(caught.value)
    assert "secret" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_file_that_is_called_like_a_home_is_found_wherever_a_path_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "~root"
    (run / "model").mkdir(parents=True)
    (run / "config.yaml").write_text(write_yaml(BASE))
    config = evaluated_config("./~root", recipe=None, prompts=Path("~root"), step=None)
    assert (config.model.path, config.prompts.source.path) == ("./~root/model", "./~root")  # type: ignore[union-attr]
    given = source_override(Path(expanded("./~root")))
    assert load_as(GenerateConfig, None, [given]).prompts.source.path == "./~root"  # type: ignore[union-attr]
    for queue in (
        RemoteQueueConfig(connection="./~root"),
        ArenaStorageConfig(directory="./~root"),
        SpillStorageConfig(directory="./~root"),
    ):
        assert queue.path.samefile(run)


@pytest.mark.parametrize(("path", "text"), [("~x/y", "./~x/y"), ("$x", "./$x"), ("x/~", "x/~"), ("/~x", "/~x")])
def test_a_path_is_said_in_a_recipe_so_that_it_stays_what_it_is(path: str, text: str) -> None:
    assert path_text(Path(path)) == text == expanded(text)
