"""Whatever characters an output has, nothing fails to be printed."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tailrace.errors import PromptError, UserError
from tailrace.generate import _typed
from tailrace.json_lines import JsonLines
from tailrace.report.display import Display
from tailrace.streams import replace_unencodable, unencodable_replaced
from tests.report.synthetic import make_events

TEXT = "accuracy 18 % · Grüße · 日本 ▁█ \udce9\n"


@pytest.fixture
def output(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> io.BytesIO:
    """What is printed, in the encoding of the test's parameter."""
    taken = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(taken, encoding=request.param, write_through=True))
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # of another kind
    return taken


@pytest.mark.parametrize(
    ("output", "printed"),
    [
        ("ascii", b"accuracy 18 % ? Gr??e ? ?? ?? ?\n"),
        ("latin-1", "accuracy 18 % · Grüße · ?? ?? ?\n".encode("latin-1")),
        ("cp1252", "accuracy 18 % · Grüße · ?? ?? ?\n".encode("cp1252")),
        ("utf-8", "accuracy 18 % · Grüße · 日本 ▁█ ?\n".encode()),
    ],
    indirect=["output"],
)
def test_what_an_encoding_lacks_is_a_question_mark(output: io.BytesIO, printed: bytes) -> None:
    replace_unencodable()
    print(TEXT, end="")
    assert output.getvalue() == printed


@pytest.mark.parametrize("output", ["ascii"], indirect=True)
def test_a_program_has_its_streams_back(output: io.BytesIO) -> None:
    with unencodable_replaced():
        print("·")
    with pytest.raises(UnicodeEncodeError):
        print("·")
    assert output.getvalue() == b"?\n"


@pytest.mark.parametrize("output", ["ascii", "latin-1", "cp1252"], indirect=True)
@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_is_displayed_whole(output: io.BytesIO, terminal: bool) -> None:
    replace_unencodable()
    with Display(Console(highlight=False, force_terminal=terminal)) as display:
        for event in make_events():
            display(event)
    assert b"step" in output.getvalue()


@pytest.mark.parametrize("output", [None])
def test_closed_standard_output_is_one_line(output: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", output)
    replace_unencodable()
    with pytest.raises(UserError, match="standard output is closed; give a file with --output FILE"):
        JsonLines(None, force=False)


def test_an_argument_is_utf8_whatever_the_locale() -> None:
    assert _typed("Grüße · 日本", 1) == "Grüße · 日本"
    assert _typed(
        os.fsdecode("日本".encode()).encode("utf-8", "surrogateescape").decode("ascii", "surrogateescape"), 1
    ) == ("日本")
    with pytest.raises(PromptError, match=r"argument 2, 'a\\udcff', is not UTF-8"):
        _typed("a\udcff", 2)


def test_the_command_prints_where_only_ascii_can_be_printed(tmp_path: Path) -> None:
    (tmp_path / "Grüße.yaml").write_text("seed: 1")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    command = [sys.executable, "-m", "tailrace", "train", "Grüßen", "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == b"tailrace: the recipe Gr??en does not exist; did you mean Gr??e.yaml?\n"
