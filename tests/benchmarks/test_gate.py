"""The programs that a benchmark starts."""

import subprocess
from pathlib import Path

import pytest
from gate import output_of


def test_a_program_that_takes_too_long_can_clean_up(tmp_path: Path) -> None:
    left = tmp_path / "left"
    script = f"trap 'rm {left}; exit 1' TERM; touch {left}; while :; do sleep 0.1; done"
    with pytest.raises(subprocess.TimeoutExpired):
        output_of(["bash", "-c", script], timeout_s=1)
    assert not left.exists()


def test_a_program_that_fails_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="exit code 3"):
        output_of(["sh", "-c", "echo 1; exit 3"], timeout_s=60)


def test_a_program_s_output_is_told() -> None:
    assert output_of(["echo", "1"], timeout_s=60) == "1\n"
