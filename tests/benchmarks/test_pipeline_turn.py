"""How a benchmark starts a run, with a program in place of it."""

import signal
import subprocess
from pathlib import Path

import pipeline_turn
import pytest
from pipeline_turn import training


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program that is started."""
    monkeypatch.setattr(pipeline_turn, "HERE", tmp_path)
    return tmp_path / "pipeline_run.py"


def test_a_run_has_its_files_and_nothing_of_an_earlier_one(program: Path, tmp_path: Path) -> None:
    program.write_text("import sys\nprint(sys.argv[2:], open(sys.argv[1] + '/config.json').read())")
    (run := tmp_path / "run").mkdir()
    (run / "events.jsonl").write_text("of an earlier run")
    with training(run, "{}", warm_up=2, steps=5, files={"given/trace": b"lengths"}) as process:
        process.wait(60)
    assert sorted(path.name for path in run.iterdir()) == ["config.json", "given", "log"]
    assert (run / "given" / "trace").read_bytes() == b"lengths"
    assert (run / "log").read_text() == "['2', '5'] {}\n"


def test_a_run_that_fails_is_an_error_that_names_its_log(program: Path, tmp_path: Path) -> None:
    program.write_text("raise SystemExit(3)")
    with (
        pytest.raises(RuntimeError, match=r"run ended with exit code 3; see .*/run/log"),
        training(tmp_path / "run", "{}", warm_up=1, steps=2) as process,
    ):
        process.wait(60)


def test_a_run_that_takes_too_long_is_ended(program: Path, tmp_path: Path) -> None:
    program.write_text("import signal\nsignal.pause()")
    with (
        pytest.raises(subprocess.TimeoutExpired),
        training(tmp_path / "run", "{}", warm_up=1, steps=2) as process,
    ):
        process.wait(0.1)
    assert process.returncode == -signal.SIGTERM
