"""Real files of every kind of source, and their errors."""

import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tailrace.config.prompts import (
    DatasetSource,
    HubSource,
    JsonlSource,
    ParquetSource,
    PromptSource,
    ReasoningGymSource,
)
from tailrace.errors import PromptError
from tailrace.prompts.sources.base import Row
from tailrace.prompts.sources.factory import source_rows
from tailrace.prompts.task_name import task_name

datasets = pytest.importorskip("datasets")


def read(config: PromptSource) -> list[Row]:
    return list(source_rows(config, "prompts.source"))


def jsonl(tmp_path: Path, *lines: Any) -> JsonlSource:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return JsonlSource(path=str(path))


def refusal(config: PromptSource) -> str:
    """The error of reading `config`, which must be one line."""
    with pytest.raises(PromptError) as caught:
        read(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_jsonl_rows_keep_prompt_answer_metadata_and_line(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "1+1?"}]
    source = jsonl(
        tmp_path, {"prompt": "2+2?", "answer": 4, "level": {"n": [1]}}, "\n", {"prompt": messages, "answer": None}
    )
    assert read(source) == [
        Row(prompt_id="data.jsonl:1", prompt="2+2?", answer="4", metadata={"level": {"n": [1]}}),
        Row(prompt_id="data.jsonl:3", prompt=messages, answer=None, metadata={}),
    ]


def test_columns_can_have_other_names_and_answers_can_be_absent(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"question": "q", "answer": "a"}).path
    named = JsonlSource(path=path, prompt_column="question", answer_column=None)
    assert read(named) == [Row(prompt_id="data.jsonl:1", prompt="q", metadata={"answer": "a"})]


def test_missing_prompt_column_names_the_nearest(tmp_path: Path) -> None:
    assert refusal(jsonl(tmp_path, {"prompts": "q", "answer": "a"})) == (
        "data.jsonl:1 has no column 'prompt' (prompts.source.prompt_column); it has prompts, answer; "
        "did you mean 'prompts'?"
    )


def test_missing_answer_column_says_how_to_do_without(tmp_path: Path) -> None:
    message = refusal(jsonl(tmp_path, {"prompt": "q", "level": 1}))
    assert message.endswith("it has prompt, level; set it to null if there are no answers")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"prompt": "q", "answer": \n',
            'such as {"prompt": "…"}: Expecting value at its character 28',
        ),
        ("[1]\n", "line 2, is not a JSON object"),
        (
            {"prompt": 3, "answer": "a"},
            "column 'prompt': a prompt must be a text or a list of chat messages, not number 3",
        ),
        ({"prompt": " ", "answer": "a"}, "data.jsonl:2, column 'prompt': the prompt is empty"),
        ({"prompt": [], "answer": "a"}, "data.jsonl:2, column 'prompt': the prompt is empty"),
        (
            {"prompt": ["x"], "answer": "a"},
            "message 1: a chat message must have the texts role and content, not text 'x'",
        ),
        ({"prompt": [{"role": "user"}], "answer": "a"}, "message 1, of the user, has no content"),
        ({"prompt": "q", "answer": ["a"]}, "data.jsonl:2, column 'answer': an answer must be a text, a number"),
    ],
)
def test_broken_row_is_named_by_its_line(tmp_path: Path, line: Any, message: str) -> None:
    assert message in refusal(jsonl(tmp_path, {"prompt": "q", "answer": "a"}, line))


def test_bytes_that_are_not_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "\xff\xfe", "answer": "a"}\n')
    assert "line 1, is not UTF-8: b'\\xff' at byte 12" in refusal(JsonlSource(path=str(path)))


@pytest.mark.parametrize("source", [JsonlSource, ParquetSource, DatasetSource])
def test_missing_file_is_named(source: Any, tmp_path: Path) -> None:
    assert str(tmp_path / "nothing") in refusal(source(path=str(tmp_path / "nothing")))


def test_parquet_rows_of_a_glob_are_in_the_order_of_their_files(tmp_path: Path) -> None:
    for name in ("b", "a"):
        frame = pl.DataFrame({"prompt": [f"{name}0", f"{name}1"], "answer": [0, 1], "on": [date(2026, 1, 2)] * 2})
        frame.write_parquet(tmp_path / f"{name}.parquet")
    rows = read(ParquetSource(path=str(tmp_path / "*.parquet")))
    assert [row.prompt for row in rows] == ["a0", "a1", "b0", "b1"]
    assert len({row.prompt_id for row in rows}) == 4
    assert rows[1].answer == "1"
    assert rows[1].metadata == {"on": "2026-01-02"}


def test_parquet_chat_messages_lose_the_nulls_of_their_table(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s", "name": "n"}, {"role": "user", "content": "u", "name": None}]
    pl.DataFrame({"prompt": [messages], "answer": ["a"]}).write_parquet(tmp_path / "x.parquet")
    (row,) = read(ParquetSource(path=str(tmp_path / "x.parquet")))
    assert row.prompt == [messages[0], {"role": "user", "content": "u"}]
    assert row.prompt_id == "x.parquet:0"


def test_parquet_errors_say_what_is_there_instead(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("not parquet")
    assert "is not a Parquet file" in refusal(ParquetSource(path=str(tmp_path / "text.parquet")))
    assert "matches no file" in refusal(ParquetSource(path=str(tmp_path / "no*.parquet")))
    assert "use a glob such as" in refusal(ParquetSource(path=str(tmp_path)))


def test_dataset_directory_gives_its_only_split(tmp_path: Path) -> None:
    dataset = datasets.Dataset.from_dict({"prompt": ["q"], "answer": ["a"], "n": [1]})
    dataset.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"test": dataset}).save_to_disk(tmp_path / "dict")
    assert read(DatasetSource(path=str(tmp_path / "one")))[0].metadata == {"n": 1}
    assert read(DatasetSource(path=str(tmp_path / "dict")))[0].prompt_id == "test:0"
    assert "remove prompts.source.split" in refusal(DatasetSource(path=str(tmp_path / "one"), split="test"))


def test_dataset_directory_with_several_splits_needs_a_choice(tmp_path: Path) -> None:
    parts = {name: datasets.Dataset.from_dict({"prompt": [name], "answer": ["a"]}) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "d")
    assert [row.prompt for row in read(DatasetSource(path=str(tmp_path / "d"), split="test"))] == ["test"]
    assert "is needed" in refusal(DatasetSource(path=str(tmp_path / "d")))
    assert "has train, test; did you mean 'train'?" in refusal(DatasetSource(path=str(tmp_path / "d"), split="trian"))


def test_hub_without_a_network_is_one_line() -> None:
    assert refusal(HubSource(name="nobody/nothing")).startswith(
        "cannot load split 'train' of prompts.source.name 'nobody/nothing' from the hub: "
    )


def test_reasoning_gym_rows_repeat_and_keep_what_the_scorer_needs() -> None:
    source = ReasoningGymSource(task="chain_sum", size=4, seed=3, parameters={"min_terms": 2, "max_terms": 2})
    rows = read(source)
    assert rows == read(source)
    assert [row.prompt_id for row in rows] == [f"chain_sum:{index}" for index in range(4)]
    assert rows[0].metadata["source_dataset"] == "chain_sum"
    assert rows[0].metadata["parameters"] == {"min_terms": 2, "max_terms": 2}
    assert rows[0].metadata["difficulty"]["num_terms"] == {"$tuple": [2, 2]}
    assert rows != read(source.model_copy(update={"seed": 4}))


def test_reasoning_gym_mixture_names_the_task_of_each_row() -> None:
    parts = [{"name": "chain_sum", "weight": 1, "config": {"min_terms": 3}}, {"name": "gcd", "weight": 1}]
    rows = read(ReasoningGymSource(task="composite", size=20, parameters={"datasets": parts}))
    kept = {(row.metadata["source_dataset"], str(row.metadata["parameters"])) for row in rows}
    assert kept == {("chain_sum", "{'min_terms': 3}"), ("gcd", "{}")}
    assert {task_name(row.metadata) for row in rows} == {"chain_sum", "gcd"}


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        ({"task": "sorting"}, "sorting"),
        ({"data_source": "openai/gsm8k", "split": "train"}, "openai/gsm8k"),
        ({"task": "leap_year", "source_dataset": "calendar"}, "calendar"),
        ({"task": 7, "data_source": "numbers"}, "numbers"),
        ({"task": "Sort these words, and give no more than their list in one line: b, a, c"}, ""),
        ({"task": ""}, ""),
        ({}, ""),
    ],
)
def test_the_task_of_a_row_is_what_its_source_names(columns: dict[str, Any], name: str) -> None:
    assert task_name(columns) == name


@pytest.mark.parametrize(
    ("task", "parameters", "message"),
    [
        ("chain_sm", {}, "did you mean 'chain_sum'?"),
        (
            "chain_sum",
            {"min_terms": 0},
            "'chain_sum' with {'min_terms': 0}: min_terms must be positive",
        ),
        ("chain_sum", {"min_trems": 2}, "chain_sum has no parameter 'min_trems'; did you mean 'min_terms'?"),
        ("chain_sum", {"zzz": 2}, "chain_sum has no parameter 'zzz'; it has allow_negation, max_digits"),
        ("chain_sum", {"seed": 2}, "set prompts.source.seed instead"),
        ("composite", {"datasets": [{"name": "gcd"}]}, "'weight'"),
    ],
)
def test_reasoning_gym_errors_are_those_of_the_generator(task: str, parameters: dict[str, Any], message: str) -> None:
    assert message in refusal(ReasoningGymSource(task=task, parameters=parameters))


@pytest.mark.parametrize("source", [DatasetSource(path="x"), HubSource(name="x")])
def test_missing_library_says_how_to_install_it(source: PromptSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'tailrace[datasets]'" in refusal(source)


GSM8K = [
    {"prompt": "How many?", "answer": "She has 3 #### boxes.\nSo 3 * 4 = <<3*4=12>>12.\n#### 12"},
    {"prompt": "How much?", "answer": "It costs 1,000.\n#### 1,000 "},
]


def test_a_pattern_takes_the_answer_out_of_its_column(tmp_path: Path) -> None:
    source = jsonl(tmp_path, *GSM8K).model_copy(update={"answer_pattern": r"####\s*(.+)"})
    assert [row.answer for row in read(source)] == ["12", "1,000"]


def test_answers_without_a_match_are_counted_and_refused(tmp_path: Path) -> None:
    rows = [*GSM8K, {"prompt": "a", "answer": "7"}, {"prompt": "b", "answer": None}, {"prompt": "c", "answer": "#### "}]
    message = refusal(jsonl(tmp_path, *rows).model_copy(update={"answer_pattern": r"####(.*)"}))
    assert "prompts.source.answer_pattern '####(.*)' finds nothing in 3 of 5 answers, the first that of" in message
    assert ":3, text '7'" in message


def test_a_pattern_without_answers_to_look_into_is_refused(tmp_path: Path) -> None:
    source = jsonl(tmp_path, *GSM8K).model_copy(update={"answer_pattern": "x", "answer_column": None})
    assert "needs prompts.source.answer_column" in refusal(source)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "q", "prompt": "r"}\n', "line 1, is not a JSON object, such as"),
        (b'{"prompt": "q", "m": {"a": 1, "a": 2}}\n', "it has 'a' twice"),
        (b'{"prompt": "q", "answer": NaN}\n', "NaN is no JSON; a missing value is null"),
        (b'{"prompt": "q", "answer": -Infinity}\n', "-Infinity is no JSON"),
        (b'\n{"prompt": "\\ud83d"}\n', "line 2, has '\\ud83d', half of a character"),
        (b'{"\\udc00": 1}\n', "line 1, has '\\udc00', half of a character"),
        (b'{"prompt": "q\xed\xa0\xbd"}\n', "line 1, is not UTF-8"),
        ('{"prompt": "ü"}\n'.encode("latin-1"), "line 1, is not UTF-8: b'\\xfc' at byte 12"),
        ('{"prompt": "q"}\n'.encode("utf-16"), "is UTF-16, not JSON objects in UTF-8"),
        (b"PAR1\x15\x04", "is Parquet, not JSON objects"),
        (b"\x1f\x8b\x08\x00", "is gzip, not JSON objects"),
        (b'[{"prompt": "q"}, {"prompt": "r"}]\n', "a file of one JSON array has to be written as one object a line"),
        (b"[\n", "line 1, is not a JSON object"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", "line 1, is nested too deep"),
        (b'{"prompt": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}\n", "line 1, is nested too deep"),
        (b"\x00\x00\x00\n", "line 1, is not a JSON object"),
    ],
)
def test_a_line_that_is_no_json_object_is_named_with_the_reason(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "data.jsonl").write_bytes(content)
    assert message in refusal(JsonlSource(path=str(tmp_path / "data.jsonl"), answer_column=None))


def test_a_line_without_an_end_in_sight_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.prompts.sources.jsonl.MAX_LINE_BYTES", 2**20)
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "a" * 2**20}))
    assert "line 1, has more than 1 MiB; a line holds one" in refusal(JsonlSource(path=str(tmp_path / "data.jsonl")))


def test_a_byte_order_mark_other_line_ends_pairs_and_nulls_are_read(tmp_path: Path) -> None:
    text = '\ufeff{"prompt": "a\\u0000b", "answer": 1}\r\n\r\n{"prompt": "\\ud83d\\ude00", "answer": 2}'
    (tmp_path / "data.jsonl").write_bytes(text.encode())
    rows = read(JsonlSource(path=str(tmp_path / "data.jsonl")))
    assert [(row.prompt, row.answer) for row in rows] == [("a\0b", "1"), ("😀", "2")]


def test_a_directory_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    assert refusal(JsonlSource(path=str(tmp_path))) == f"cannot read prompts.source.path {tmp_path}: Is a directory"


@pytest.mark.parametrize("damage", ["truncated", "footer", "middle", "empty"])
def test_damaged_parquet_is_one_line(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "x.parquet"
    pl.DataFrame({"prompt": [f"q{n}" for n in range(1000)], "answer": range(1000)}).write_parquet(path)
    content = bytearray(path.read_bytes())
    match damage:
        case "truncated":
            content = content[: len(content) // 2]
        case "footer":
            content[-40:-20] = b"\xff" * 20
        case "middle":
            content[4 : len(content) // 2] = bytes(len(content) // 2 - 4)
        case "empty":
            content.clear()
    path.write_bytes(content)
    assert f"prompts.source.path {path} is not a Parquet file, or damaged: " in refusal(ParquetSource(path=str(path)))


def test_messages_name_the_key_of_their_source(tmp_path: Path) -> None:
    source = jsonl(tmp_path, {"prompt": "q"})
    with pytest.raises(PromptError, match=r"\(prompts.validation.gsm8k.answer_column\)"):
        list(source_rows(source, "prompts.validation.gsm8k"))


def test_narrow_floats_of_a_dataset_read_as_they_were_written(tmp_path: Path) -> None:
    features = datasets.Features({"prompt": datasets.Value("string"), "r": {"answer": datasets.Value("float32")}})
    rows = {"prompt": ["q", "q"], "r": [{"answer": 0.1}, {"answer": 4.0}]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "d")
    found = read(DatasetSource(path=str(tmp_path / "d"), answer_column="r.answer"))
    assert [row.answer for row in found] == ["0.1", "4"]
