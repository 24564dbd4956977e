"""`tailrace rank fit`: what it reads, writes, says and refuses."""

import json
import os
import random
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tailrace.config.rollout import FeaturesLengths
from tailrace.run.lengths import make_lengths
from tailrace.workloads.files import write_trace
from tailrace.workloads.trace import Provenance, Trace
from tests.conftest import Command, TinyModel


@pytest.fixture
def responses(tmp_path: Path) -> Path:
    """What `tailrace generate` writes: longer prompts have longer responses."""
    chance = random.Random(0)
    lines: list[dict[str, Any]] = []
    for number in range(80):
        words = chance.randint(1, 20)
        for sample in range(4):
            tokens = max(1, round(10 * words * chance.lognormvariate(0, 0.2)))
            prompt = f"prompt {number} " + "word " * words
            lines.append({"index": number, "prompt": prompt, "sample": sample, "tokens": tokens, "weight_version": 0})
    path = tmp_path / "responses.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("kind", ["features", "lambdarank", "model", "history"])
def test_a_predictor_is_taught_and_checked_on_what_it_was_not_taught(
    kind: str, responses: Path, tmp_path: Path, tiny_model: TinyModel, tailrace_here: Command
) -> None:
    ranker = tmp_path / "lengths.ranker"
    arguments = ("--output", str(ranker), "--type", kind, "--model", str(tiny_model("llama")), "--words", "16")
    done = tailrace_here("rank", "fit", str(responses), *arguments)
    assert done.returncode == 0, done.stderr
    assert "taught by 320 responses to 80 prompts" in done.stdout
    shares = [line for line in done.stdout.splitlines() if line.startswith("of the longest 20 %")]
    assert int(shares[0].removeprefix("of the longest 20 %").split()[0]) >= 50, "percent"
    if kind == "features":
        make_lengths(FeaturesLengths(words=16, ranker=str(ranker)), tiny_model("llama"))


def test_the_task_that_a_prompts_metadata_names_tells_lengths_apart(
    tmp_path: Path, tiny_model: TinyModel, tailrace_here: Command
) -> None:
    path, tasks = tmp_path / "responses.jsonl", {"proof": 400, "sum": 20, "list": 60, "story": 130}
    chance = random.Random(0)
    lines = [
        {"prompt": f"{chance.random()}", "tokens": length + number % 10, "metadata": {"task": task, "other": number}}
        for number in range(100)
        for task, length in tasks.items()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ("--output", str(tmp_path / "ranker"), "--type", "features", "--model", str(tiny_model("llama")))
    done = tailrace_here("rank", "fit", str(path), *arguments)
    assert done.returncode == 0, done.stderr
    (shares,) = (line for line in done.stdout.splitlines() if line.startswith("of the longest 20 %"))
    assert "ranker: features, taught by 400 responses to 400 prompts of 4 tasks" in done.stdout
    assert int(shares.removeprefix("of the longest 20 %").split()[0]) >= 75, "percent: only tasks tell them apart"


def test_a_trace_teaches_features_alone(tmp_path: Path, tiny_model: TinyModel, tailrace_here: Command) -> None:
    samples = [
        {"step": 0, "group": group, "sample": n, "prompt_tokens": 10 + group, "response_tokens": 20 + 5 * group + n}
        for group in range(40)
        for n in range(2)
    ]
    trace = tmp_path / "trace.jsonl"
    write_trace(Trace.of(pl.DataFrame(samples), Provenance(source="test")), trace)
    arguments = ("--output", str(tmp_path / "ranker"), "--model", str(tiny_model("llama")))
    done = tailrace_here("rank", "fit", str(trace), *arguments, "--type", "features")
    assert done.returncode == 0, done.stderr
    assert "taught by 80 responses to 40 prompts" in done.stdout
    refused = tailrace_here("rank", "fit", str(trace), *arguments, "--type", "history", "--force")
    assert refused.returncode == 2
    assert "is a trace, which has no texts; it can teach --type features alone" in refused.stderr


def test_what_cannot_be_read_or_written_is_refused_and_nothing_is_written(
    responses: Path, tmp_path: Path, tiny_model: TinyModel, tailrace_here: Command
) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(responses.read_text().splitlines(keepends=True)[:8]))
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text(responses.read_text() + '{"prompt": "x", "tokens": 0}\n')
    huge, textless = tmp_path / "huge.jsonl", tmp_path / "textless.jsonl"
    huge.write_text('{"prompt": "x", "tokens": 1000000000000000000000}\n')
    textless.write_text('\n\n{"index": 0, "response": "x", "tokens": 1}\n')
    latin = tmp_path / "latin.jsonl"
    latin.write_text('{"prompt": "é", "tokens": 1}\n', encoding="latin-1")
    output, model = tmp_path / "lengths.ranker", str(tiny_model("llama"))
    cases: list[tuple[list[str | Path], str]] = [
        ([few], "8 responses in "),
        (
            [wrong],
            "wrong.jsonl, line 321: Expected `int` >= 1 - at `$.tokens`; give what tailrace generate has written",
        ),
        ([tmp_path / "none.jsonl"], "none.jsonl cannot be read: No such file or directory"),
        (
            [responses, "--type", "siblings"],
            "--type siblings cannot be taught; give history, features, lambdarank or model",
        ),
        ([responses, "--layer", "7"], "layer 7 of "),
        ([responses, "--layer", "7", "--type", "features"], "--reader and --layer are for --type model"),
        ([responses, "--reader", "/none"], "rollout.lengths.path /none does not exist"),
        ([huge], "line 1: Expected `int` <= 1000000000"),
        ([textless], "line 3: Object missing required field `prompt`"),
        ([latin], "line 1: 'utf-8' codec can't decode"),
        ([responses, "--output", tmp_path], "is a directory; give a file"),
    ]
    for arguments, said in cases:
        done = tailrace_here("rank", "fit", "--output", str(output), "--model", model, *map(str, arguments))
        assert done.returncode in (1, 2), done.stdout
        assert said in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not output.exists()


def test_a_ranker_that_cannot_be_written_whole_leaves_the_older_one(
    responses: Path, tmp_path: Path, tiny_model: TinyModel, tailrace_here: Command
) -> None:
    output = tmp_path / "lengths.ranker"
    output.write_bytes(b"older")
    (tmp_path / f".lengths.ranker.{os.getpid()}.partial").symlink_to("/dev/full")
    arguments = ("--output", str(output), "--type", "features", "--model", str(tiny_model("llama")), "--force")
    done = tailrace_here("rank", "fit", str(responses), *arguments)
    assert done.returncode == 2
    assert done.stderr == f"tailrace: --output {output} cannot be written: No space left on device\n"
    assert output.read_bytes() == b"older"
