"""Printing never fails, whatever characters the output's encoding lacks."""

import io
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tailrace.commands.generate import _typed
from tailrace.commands.json_lines import JsonLines
from tailrace.errors import PromptError, TailraceWarning, UserError
from tailrace.host.streams import outliving_readers, replace_unencodable, unencodable_replaced, warn_in_one_line
from tailrace.report.display import Display
from tests.report.synthetic import resumed_run

TEXT = "accuracy 18 % · Grüße · 日本 ▁█ \udce9\n"
Printed = Callable[[str], io.BytesIO]


@pytest.fixture
def printed_in(monkeypatch: pytest.MonkeyPatch) -> Printed:
    """Print to a buffer in a given encoding from then on."""

    def begin(encoding: str) -> io.BytesIO:
        taken = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(taken, encoding=encoding, write_through=True))
        monkeypatch.setattr(sys, "stderr", io.StringIO())  # a stream of another kind
        return taken

    return begin


@pytest.mark.parametrize(
    ("encoding", "printed"),
    [
        ("ascii", "accuracy 18 % ? Gr??e ? ?? ?? ?\n"),
        ("latin-1", "accuracy 18 % · Grüße · ?? ?? ?\n"),
        ("cp1252", "accuracy 18 % · Grüße · ?? ?? ?\n"),
        ("utf-8", "accuracy 18 % · Grüße · 日本 ▁█ ?\n"),
    ],
)
def test_what_an_encoding_lacks_is_a_question_mark(encoding: str, printed: str, printed_in: Printed) -> None:
    output = printed_in(encoding)
    replace_unencodable()
    print(TEXT, end="")
    assert output.getvalue() == printed.encode(encoding)


@pytest.mark.filterwarnings("always")
def test_a_warning_of_its_own_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warn_in_one_line("tailrace: ")
        warnings.warn("TP stays 1", TailraceWarning, stacklevel=1)
        assert capsys.readouterr().err == "tailrace: warning: TP stays 1\n"
        warnings.warn("of a library", UserWarning, stacklevel=1)
        assert "UserWarning: of a library" in capsys.readouterr().err


def test_a_line_reaches_an_unbuffered_stream_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(file, write_through=True))  # as with PYTHONUNBUFFERED
        with outliving_readers():
            print("a line", file=sys.stderr)
            assert log.read_text() == "a line\n"


def test_text_that_fails_for_another_reason_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(OSError, match="No space left"), outliving_readers():
            print("a line", flush=True)
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # so that its buffer can be flushed now


def test_a_program_may_begin_without_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with outliving_readers():
        print("nobody reads it")
    assert sys.stdout is None


def test_a_program_has_its_streams_back(printed_in: Printed) -> None:
    output = printed_in("ascii")
    with unencodable_replaced():
        print("·")
    with pytest.raises(UnicodeEncodeError):
        print("·")
    assert output.getvalue() == b"?\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_is_displayed_whole(encoding: str, terminal: bool, printed_in: Printed) -> None:
    output = printed_in(encoding)
    replace_unencodable()
    with Display(Console(highlight=False, force_terminal=terminal)) as display:
        for event in resumed_run():
            display(event)
    assert b"step" in output.getvalue()


def test_closed_standard_output_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    replace_unencodable()
    with pytest.raises(UserError, match="standard output is closed; give a file with --output FILE"):
        JsonLines(None, force=False)


def test_an_argument_is_utf8_whatever_the_locale() -> None:
    assert _typed("Grüße · 日本", 1) == "Grüße · 日本"
    assert _typed("日本".encode().decode("ascii", "surrogateescape"), 1) == "日本"
    with pytest.raises(PromptError, match=r"argument 2, 'a\\udcff', is not UTF-8"):
        _typed("a\udcff", 2)


def test_the_command_prints_where_only_ascii_can_be_printed(tmp_path: Path) -> None:
    (tmp_path / "Grüße.yaml").write_text("sed: 1", encoding="utf-8")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "tailrace", "train", "Grüße", "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(rb"tailrace: Gr\xfc\xdfe: unknown key sed")
    shown = subprocess.run([*command[:4], "--help"], env=environment, capture_output=True, timeout=60, check=True)
    assert shown.stdout.isascii()
