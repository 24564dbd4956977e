"""Prompts in, JSON lines out: whole, in time, and never over an existing file."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tailrace.commands.generate import Line, generate, load_inputs, make_requests
from tailrace.commands.json_lines import JsonLines
from tailrace.config.generate import GenerateConfig
from tailrace.config.load import load_as, parse_as
from tailrace.config.shorthand import source_override, split_arguments
from tailrace.engine.backends.fake import FakeEngine, RandomPlaywright
from tailrace.engine.base import Engine, EngineArgs, SampleStream
from tailrace.errors import ConfigError, PromptError, RequestError, UserError
from tailrace.types import Request
from tests.conftest import Command, TinyModel

LINE = Line(
    index=0,
    prompt_id="a",
    prompt="p",
    sample=0,
    response="r",
    finish_reason="stop",
    tokens=1,
    log_prob=-1.0,
    weight_version=0,
)


@pytest.fixture
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("llama")


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def configured(model: Path, **changes: Any) -> GenerateConfig:
    """A configuration of the fake engine with short responses."""
    values = {
        "model": {"path": str(model)},
        "engine": {"type": "fake"},
        "sampling": {"max_new_tokens": 8},
        "threads": 1,
        **changes,
    }
    return parse_as(GenerateConfig, values, source="test")


def from_file(path: Path) -> dict[str, Any]:
    return {"source": {"type": "jsonl", "path": str(path), "answer_column": None}}


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]  # text would also split at other marks


def tailrace(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tailrace", "generate", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_every_sample_of_every_prompt_is_one_line(tmp_path: Path, model: Path) -> None:
    output = tmp_path / "out.jsonl"
    assert generate(configured(model, samples=3), ["one", "two"], output) == 0
    lines = lines_of(output)
    assert sorted((line["index"], line["sample"]) for line in lines) == [(i, s) for i in range(2) for s in range(3)]
    first = next(line for line in lines if line["index"] == 0)
    assert set(first) == {
        "index", "prompt_id", "prompt", "sample", "response", "finish_reason", "tokens", "log_prob", "weight_version",
    }  # fmt: skip
    assert first["prompt"] == "<user>one<eos><assistant>"
    assert first["prompt_id"] == "argument 1"
    assert all(1 <= line["tokens"] <= 8 and line["log_prob"] < 0 and line["weight_version"] == 0 for line in lines)


def test_samples_of_a_prompt_differ_and_a_seed_repeats_them(tmp_path: Path, model: Path) -> None:
    for name in ("a", "b"):
        generate(configured(model, samples=4, seed=1), ["one"], tmp_path / name)
    generate(configured(model, samples=4, seed=2), ["one"], tmp_path / "c")
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text() != (tmp_path / "c").read_text()
    assert len({line["response"] for line in lines_of(tmp_path / "a")}) > 1


def test_the_other_columns_of_a_prompt_come_out_again(tmp_path: Path, model: Path) -> None:
    source = write_rows(tmp_path / "p.jsonl", {"prompt": "hi", "answer": "42", "level": 3})
    generate(configured(model, prompts=from_file(source)), output=tmp_path / "metadata")
    with_answer = {"source": {"type": "jsonl", "path": str(source)}}
    generate(configured(model, prompts=with_answer), output=tmp_path / "answer")
    assert lines_of(tmp_path / "metadata")[0]["metadata"] == {"answer": "42", "level": 3}
    assert lines_of(tmp_path / "answer")[0]["answer"] == "42"
    assert lines_of(tmp_path / "answer")[0]["prompt_id"] == "p.jsonl:1"


def test_the_native_engine_answers_greedily_whatever_else_is_in_the_batch(tmp_path: Path, model: Path) -> None:
    engine = {"type": "native", "dtype": "float32", "kv_cache_gib": 0.01}
    greedy = {"max_new_tokens": 12, "temperature": 0}
    generate(configured(model, engine=engine, sampling=greedy, samples=3), ["one", "two", "three"], tmp_path / "many")
    generate(configured(model, engine=engine, sampling=greedy), ["two"], tmp_path / "one")
    (alone,) = lines_of(tmp_path / "one")
    others = [line for line in lines_of(tmp_path / "many") if line["index"] == 1]
    assert [line["response"] for line in others] == [alone["response"]] * 3
    assert others[0]["log_prob"] == pytest.approx(alone["log_prob"], abs=1e-4)


@pytest.mark.parametrize(("order", "priorities"), [("first_in", [0.0] * 6), ("longest_first", [5, 5, 70, 70, 6, 6])])
def test_the_order_becomes_priorities(tmp_path: Path, model: Path, order: str, priorities: list[float]) -> None:
    rows = [{"prompt": f"n{k}", "expected_tokens": tokens} for k, tokens in enumerate([5, 70, 6.0])]
    config = configured(model, prompts=from_file(write_rows(tmp_path / "p.jsonl", *rows)), order=order, samples=2)
    requests = make_requests(config, load_inputs(config, ()).prompts)
    assert [request.priority for request in requests] == priorities
    assert [request.request_id for request in requests] == list(range(6))
    assert [request.group_id for request in requests] == [0, 0, 1, 1, 2, 2]


RANKED = {"type": "native", "dp": 2, "adaptive_tp": {"estimate": "ranked"}}


def test_an_engine_that_ranks_lengths_is_told_them(tmp_path: Path, model: Path) -> None:
    rows = [{"prompt": f"n{k}", "expected_tokens": tokens} for k, tokens in enumerate([5, 70])]
    config = configured(model, prompts=from_file(write_rows(tmp_path / "p.jsonl", *rows)), engine=RANKED, samples=2)
    requests = make_requests(config, load_inputs(config, ()).prompts)
    assert [request.expected_tokens for request in requests] == [5, 5, 70, 70]
    assert [request.priority for request in requests] == [0.0] * 4


@pytest.mark.parametrize("asking", [{"order": "longest_first"}, {"engine": RANKED}])
@pytest.mark.parametrize(("row", "shown"), [({}, "nothing"), ({"expected_tokens": "many"}, "'many'")])
def test_who_asks_for_lengths_names_the_prompt_that_expects_no_number(
    tmp_path: Path, model: Path, row: dict[str, Any], shown: str, asking: dict[str, Any]
) -> None:
    source = write_rows(tmp_path / "p.jsonl", {"prompt": "a", "expected_tokens": 1}, {"prompt": "b", **row})
    config = configured(model, prompts=from_file(source), **asking)
    with pytest.raises(PromptError, match=rf"(first|ranked) needs a number expected_tokens in p\.jsonl:2, not {shown}"):
        generate(config, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_existing_output_is_refused_and_left_alone(tmp_path: Path, model: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("precious")
    with pytest.raises(UserError, match=r"out\.jsonl exists; give another file, or replace it with --force"):
        generate(configured(model), ["one"], output)
    assert output.read_text() == "precious"
    generate(configured(model), ["one"], output, force=True)
    assert [line["index"] for line in lines_of(output)] == [0]


@pytest.mark.parametrize("pattern", ["p.jsonl", "*.jsonl"])
def test_prompts_are_never_overwritten_with_their_answers(tmp_path: Path, model: Path, pattern: str) -> None:
    source = write_rows(tmp_path / "p.jsonl", {"prompt": "hi"})
    (tmp_path / "link").symlink_to(source)
    for output in (source, tmp_path / "link"):
        prompts = {"source": {"type": "parquet", "path": str(tmp_path / pattern), "answer_column": None}}
        with pytest.raises(UserError, match="is an input of this command; give another file"):
            generate(configured(model, prompts=prompts), output=output, force=True)
    assert lines_of(source) == [{"prompt": "hi"}]


@pytest.mark.parametrize("force", [False, True])
def test_a_directory_is_no_output(tmp_path: Path, model: Path, force: bool) -> None:
    with pytest.raises(UserError, match=rf"^--output {tmp_path} is a directory; give a file$"):
        generate(configured(model), ["one"], tmp_path, force=force)


def test_an_output_that_cannot_be_made_says_why(model: Path) -> None:
    with pytest.raises(UserError, match=r"^--output /proc/nothing cannot be made: No such file or directory$"):
        generate(configured(model), ["one"], Path("/proc/nothing"))


def test_a_device_needs_no_force_and_stays(model: Path) -> None:
    assert generate(configured(model), ["one"], Path("/dev/null")) == 0
    assert Path("/dev/null").is_char_device()


def test_an_output_without_a_line_is_removed(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "out", force=False):
        assert (tmp_path / "out").exists()
    assert not (tmp_path / "out").exists()


def test_wrong_input_leaves_a_file_that_was_to_be_replaced_alone(tmp_path: Path, model: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("precious")
    with pytest.raises(PromptError, match="argument 2"):
        generate(configured(model), ["one", "  "], output, force=True)
    assert output.read_text() == "precious"


def test_what_only_the_engine_refuses_leaves_that_file_alone_and_is_bad_input(tmp_path: Path, model: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("precious")

    class Refusing(FakeEngine):
        def submit(self, requests: Sequence[Request]) -> SampleStream:
            raise RequestError("request 0 has a prompt token outside the vocabulary")

    def make(config: object, args: EngineArgs) -> Engine:
        return Refusing(executor=args.executor, playwright=RandomPlaywright(9))

    with (
        patch("tailrace.engine.opening.make_engine", make),
        pytest.raises(UserError, match="request 0 has a prompt token outside the vocabulary"),
    ):
        generate(configured(model), ["one"], output, force=True)
    assert output.read_text() == "precious"


def test_an_interrupt_after_which_everything_finishes_is_none(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Finishing(FakeEngine):
        def submit(self, requests: Sequence[Request]) -> SampleStream:
            os.kill(os.getpid(), signal.SIGINT)
            return super().submit(requests)

        async def abort(self, request_ids: Iterable[int]) -> None:
            """Abort nothing: all requests have finished."""

    def make(config: object, args: EngineArgs) -> Engine:
        return Finishing(executor=args.executor, playwright=RandomPlaywright(9))

    with patch("tailrace.engine.opening.make_engine", make):
        assert generate(configured(model, samples=3), ["one"], tmp_path / "out") == 0
    shown = capsys.readouterr().err
    assert "Stopping" in shown
    assert "Interrupted" not in shown
    assert len(lines_of(tmp_path / "out")) == 3


def test_sampling_that_vllm_would_change_is_refused_before_it_starts(tmp_path: Path, model: Path) -> None:
    config = configured(model, engine={"type": "vllm"}, sampling={"temperature": 0.001})
    with pytest.raises(ConfigError, match=r"sampling has temperature 0\.001; vLLM takes 0\.01 or more, or 0"):
        generate(config, ["one"], tmp_path / "out.jsonl")


def test_an_output_without_a_directory_is_refused_before_anything_starts(tmp_path: Path, model: Path) -> None:
    with pytest.raises(UserError, match="nowhere is not a directory"):
        generate(configured(model), ["one"], tmp_path / "nowhere" / "out.jsonl")


def test_a_line_that_does_not_fit_the_disk_is_not_there_at_all(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with JsonLines(path, force=False) as lines:
        lines.write(LINE)
        whole = path.read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 10, before[1]))
        try:
            with pytest.raises(UserError, match=r"out\.jsonl cannot be written: File too large"):
                lines.write(LINE)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == whole


def test_a_full_device_is_one_clear_line() -> None:
    with (
        JsonLines(Path("/dev/full"), force=True) as lines,
        pytest.raises(UserError, match="/dev/full cannot be written: No space left on device"),
    ):
        lines.write(LINE)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"prompt": "a"}\n{"prompt":\n', "line 2, is not a JSON object"),
        ("What is 1 + 1?\n", 'line 1, is not a JSON object, such as {"prompt": "…"}: '),
        ('{"prompt": "a"}\n{"promt": "b"}\n', "p.jsonl:2 has no column 'prompt'"),
        ('{"prompt": "a"}\n{"prompt": 3}\n', "p.jsonl:2, column 'prompt': a prompt must be a text"),
        ("\n", "prompts.source has no prompts"),
        (json.dumps({"prompt": "x" * 600}), "prompt p.jsonl:1 has 603 tokens, more than the limit of 511 (1 of 1"),
    ],
)
def test_a_bad_prompt_is_named(tmp_path: Path, model: Path, content: str, expected: str) -> None:
    source = tmp_path / "p.jsonl"
    source.write_text(content)
    with pytest.raises(PromptError) as caught:
        generate(configured(model, prompts=from_file(source)), output=tmp_path / "out")
    assert expected in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_prompts_are_given_in_exactly_one_way(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match="there are no prompts; give them as arguments"):
        load_inputs(configured(model), ())
    source = write_rows(tmp_path / "p.jsonl", {"prompt": "a"})
    with pytest.raises(ConfigError, match=r"as arguments and as prompts\.source"):
        load_inputs(configured(model, prompts=from_file(source)), ["b"])


def test_a_cache_too_small_for_the_longest_sequence_is_named(tmp_path: Path, model: Path) -> None:
    engine = {"type": "native", "dtype": "float32", "kv_cache_gib": 0.0002}
    config = configured(model, engine=engine, sampling={"max_new_tokens": 400})
    with pytest.raises(ConfigError, match=r"engine\.kv_cache_gib 0\.0002 holds \d+ tokens"):
        generate(config, ["one"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_arguments_that_look_like_a_key_are_overrides_and_the_rest_are_prompts() -> None:
    prompts = [
        "What is 1 + 1?", "What is 3=3?", "f(x) = 3", "f(x)=3", "a b=c", "3=3", "x=3, what is x+1?", "n=3 or 4",
        "y=2x+1, what is y at x=3?",
    ]  # fmt: skip
    changes = [
        "engine.tp=2", "samples=4", "sampling.top_k=", "modle.path=x", "sample=3", "temperature=0", "n=3", "x.y=1",
        "samples..n=4", "model.path=my models/one", "prompts.system_prompt=Be brief. Be right.",
    ]  # fmt: skip
    assert split_arguments([*prompts, *changes], GenerateConfig.model_fields) == (prompts, changes)


def test_the_prompts_option_stands_for_a_key_and_keys_of_the_arguments_win() -> None:
    source = source_override(Path("a: b.jsonl"))
    config = load_as(GenerateConfig, None, [source, "prompts.source.prompt_column=question"])
    assert config.prompts.source is not None
    assert config.prompts.source.model_dump() == {
        "type": "jsonl", "path": "a: b.jsonl", "prompt_column": "question", "answer_column": None,
        "answer_pattern": None,
    }  # fmt: skip
    assert load_as(GenerateConfig, None, [source_override(Path("p.parquet"))]).prompts.source is not None


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("sampling.temprature=0", "unknown key sampling.temprature; did you mean sampling.temperature?"),
        ("temperature=0", "unknown key temperature; did you mean sampling.temperature?"),
        ("n=3", "unknown key n; n is called samples here"),
        ("trainer.lr=1", "unknown key trainer; expected one of device, engine, model"),
        ("order=shortest", "order is 'shortest': input should be 'first_in' or 'longest_first'"),
        ("order=first-in", "input should be 'first_in' or 'longest_first'; did you mean 'first_in'?"),
        ("engine.link={}", "engine with link needs tp of 2 or more, since one rank exchanges nothing"),
        ("engine.backend=vllm", "unknown key engine.backend; did you mean engine.type=vllm?"),
        ("samples=0", "samples is 0: input should be greater than 0"),
        ("prompts.source={type: jsonl}", "prompts.source.path is required and missing"),
        ("prompts.source={type: csv}", "prompts.source.type is 'csv'; expected one of"),
    ],
)
def test_a_mistake_in_the_configuration_names_the_key(override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_as(GenerateConfig, None, [override])
    assert str(caught.value).startswith("command line: ")
    assert expected in str(caught.value)


def test_a_recipe_gives_what_the_command_line_leaves_out(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("samples: 2\nsampling: {temperature: 0.5, top_k: 7}\n")
    config = load_as(GenerateConfig, recipe, ["sampling.top_k=9"])
    assert (config.samples, config.sampling.temperature, config.sampling.top_k) == (2, 0.5, 9)


def test_the_last_line_on_stderr_counts_what_is_on_stdout(tmp_path: Path, model: Path, tailrace_here: Command) -> None:
    source = write_rows(tmp_path / "p.jsonl", *({"prompt": f"n{k}"} for k in range(3)))
    arguments = ["--prompts", str(source), "prompts.chat_template=false", "samples=4", f"model.path={model}"]
    done = tailrace_here("generate", *arguments, "engine.type=fake", "sampling.max_new_tokens=20", "threads=1")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.encode().splitlines()]
    assert [line["prompt"] for line in sorted(lines, key=lambda line: int(line["index"]))][::4] == ["n0", "n1", "n2"]
    tokens = sum(line["tokens"] for line in lines)
    summary = done.stderr.splitlines()[-1]
    assert summary.startswith(f"12 samples · {tokens} tokens in ")
    assert summary.endswith("prefill 6 tokens computed, 0 shared · 0 preemptions")


def test_prompts_come_from_standard_input_and_lines_go_to_standard_output(model: Path) -> None:
    done = tailrace(
        "--prompts", "-", "--output", "/dev/stdout", f"model.path={model}", "engine.type=fake",
        stdin='\ufeff{"prompt": "hi", "level": 3}\n',
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = map(json.loads, done.stdout.splitlines())
    assert (line["prompt_id"], line["metadata"]) == ("stdin:1", {"level": 3})


def test_what_is_compiled_at_first_use_is_announced_on_stderr(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAILRACE_CACHE", str(tmp_path))
    settings = ["engine.tp=2", "engine.dtype=float32", "engine.kv_cache_gib=0.01", "sampling.max_new_tokens=3"]
    done = tailrace("one", f"model.path={model}", *settings)
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    assert said[0].startswith("compiling the ")
    assert "compiling the shared_memory kernel (once) …" in said
    assert json.loads(done.stdout)["tokens"] <= 3


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path: Path, tailrace_here: Command) -> None:
    done = tailrace_here("generate", "--prompts", str(tmp_path / "none.jsonl"))
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == f"tailrace: cannot read prompts.source.path {tmp_path}/none.jsonl: No such file or directory\n"
    )


def test_an_interrupt_keeps_what_is_finished(model: Path) -> None:
    command = [sys.executable, "-m", "tailrace", "generate", "one", "samples=200", f"model.path={model}"]
    process = subprocess.Popen(
        [*command, "engine.type=fake", "sampling.max_new_tokens=60000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,  # else a buffer would take more than the first line
    )
    assert process.stdout is not None
    first = process.stdout.readline()  # the first of 200 finishes within some 300 of 60,000 steps
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=120)
    lines = [json.loads(line) for line in (first + rest).splitlines()]
    shown = errors.decode().splitlines()
    assert process.returncode == 130
    assert 1 <= len(lines) < 200
    assert "abort" not in {line["finish_reason"] for line in lines}
    assert f"Interrupted: {len(lines)} of 200 samples are written." in shown
    assert shown[-1].startswith(f"{len(lines)} sample")
