"""Tasks on a command line become sources of prompts."""

from pathlib import Path
from typing import Any

import pytest

from tailrace.config.generate import EvalConfig
from tailrace.config.load import load_as
from tailrace.config.task_source import task_sources
from tailrace.errors import ConfigError

GYM = {"type": "reasoning_gym", "size": 200, "seed": 1_000_000}
HUB = {"type": "hub", "split": "test"}


@pytest.mark.parametrize(
    ("task", "name", "source"),
    [
        ("reasoning_gym:chain_sum", "chain_sum", {**GYM, "task": "chain_sum"}),
        ("reasoning_gym:chain_sum,size=5,seed=3", "chain_sum", {**GYM, "task": "chain_sum", "size": 5, "seed": 3}),
        (
            "reasoning_gym:chain_sum,parameters.min_terms=2,parameters.max_terms=3",
            "chain_sum",
            {**GYM, "task": "chain_sum", "parameters": {"min_terms": 2, "max_terms": 3}},
        ),
        (
            "reasoning_gym:chain_sum,parameters={min_terms: 2, max_terms: 3},size=4",
            "chain_sum",
            {**GYM, "task": "chain_sum", "parameters": {"min_terms": 2, "max_terms": 3}, "size": 4},
        ),
        ("hub:openai/gsm8k,subset=main", "gsm8k", {**HUB, "name": "openai/gsm8k", "subset": "main"}),
        ("hub:openai/gsm8k,split=train", "gsm8k", {**HUB, "name": "openai/gsm8k", "split": "train"}),
        ("data/test.jsonl", "test", {"type": "jsonl", "path": "data/test.jsonl"}),
        ("my set.v2.parquet", "my-set-v2", {"type": "parquet", "path": "my set.v2.parquet"}),
        ("data/*.parquet", "parquet", {"type": "parquet", "path": "data/*.parquet"}),
        ("jsonl:lines.txt", "lines", {"type": "jsonl", "path": "lines.txt"}),
        ("-", "stdin", {"type": "jsonl", "path": "/dev/stdin"}),
        ("source.jsonl", "source-2", {"type": "jsonl", "path": "source.jsonl"}),
        (
            "a.jsonl,answer_pattern='x, (.+)',prompt_column=q",
            "a",
            {"type": "jsonl", "path": "a.jsonl", "answer_pattern": "x, (.+)", "prompt_column": "q"},
        ),
    ],
)
def test_a_task_is_a_source_with_its_settings(task: str, name: str, source: dict[str, Any]) -> None:
    assert task_sources([task], {}) == {name: source}
    sections = {"prompts": {"validation": {name: source}}, "rewards": {"grader": {"type": "exact"}}}
    assert name in load_as(EvalConfig, sections).prompts.validation


def test_a_directory_is_a_data_set_of_its_own(tmp_path: Path) -> None:
    assert task_sources([str(tmp_path)], {}) == {tmp_path.name: {"type": "dataset", "path": str(tmp_path)}}


def test_tasks_of_one_name_are_told_apart() -> None:
    assert list(task_sources(["a/test.jsonl", "b/test.jsonl", "hub:c/test"], {})) == ["test", "test-2", "test-3"]


def test_a_task_has_the_columns_of_a_recipe_with_its_type_and_nothing_else_of_it() -> None:
    columns = {"type": "hub", "name": "x", "subset": "main", "split": "train", "prompt_column": "q"}
    found = task_sources(["hub:y", "a.jsonl", "hub:z,prompt_column=p"], columns)
    assert found["y"] == {**HUB, "name": "y", "prompt_column": "q"}
    assert found["a"] == {"type": "jsonl", "path": "a.jsonl"}
    assert found["z"]["prompt_column"] == "p"


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            "chain_sum",
            "'chain_sum' is no source of prompts; give a .jsonl or .parquet file, a directory of save_to_disk",
        ),
        ("reasoning-gym:chain_sum", "did you mean 'reasoning_gym'"),
        ("reasoning_gym:", "'reasoning_gym:' is no source of prompts"),
        ("https://x.org/a", "the task is a URL, and has to be a path on this machine; download it first"),
        ("nowhere/at/all", "is no source of prompts"),
        ("~nobody-here/a", "begins with a user who is not known"),
        ("a.jsonl,prompt_column=[", "'prompt_column=…' cannot be read"),
    ],
)
def test_what_is_no_task_is_one_line(task: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        task_sources([task], {})
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
