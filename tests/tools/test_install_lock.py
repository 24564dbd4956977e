"""The set-up chooses a build of PyTorch that suits the machine, and says which."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tools import install_lock
from tools.install_lock import SetupError, has_gpu, install, refusal, torch_version, without_cuda

LOCK = """# torch==1.0 in a comment
numpy==2.4.6
nvidia-cublas==13.1.1.3 ; sys_platform == "linux"
cuda-bindings==13.5.0 ; sys_platform == "linux"
nvidiax==1.0
torch==2.13.0
torchmetrics==1.0
triton==3.7.1 ; sys_platform == "linux"
"""
WITHOUT = "# torch==1.0 in a comment\nnumpy==2.4.6\nnvidiax==1.0\ntorchmetrics==1.0\n"


class Pip:
    """A stand-in for pip's processes. It keeps what is installed, and refuses what it is told to refuse."""

    def __init__(self, refused: str = "") -> None:
        self.refused = refused
        self.installed: list[str] = []

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        wanted = command[-1]
        text = Path(wanted).read_text(encoding="utf-8") if wanted.endswith(".lock") else wanted
        if self.refused and self.refused in text:
            return subprocess.CompletedProcess(command, 1, f"WARNING: slow\nERROR: no {self.refused}\n")
        self.installed.append(text)
        return subprocess.CompletedProcess(command, 0, "")


@pytest.fixture
def machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[list[str], str]]:
    """Install on a machine with these properties. Return what is installed and printed."""

    def run(choice: str, *, gpu: bool = False, system: str = "linux", refused: str = "") -> tuple[list[str], str]:
        pip, lock = Pip(refused), tmp_path / "requirements.lock"
        lock.write_text(LOCK)
        monkeypatch.setattr(sys, "platform", system)
        monkeypatch.setattr(install_lock, "has_gpu", lambda: gpu)
        monkeypatch.setattr(subprocess, "run", pip)
        install(lock, choice)
        return pip.installed, capsys.readouterr().out

    return run


def test_without_a_gpu_the_cpu_build_takes_the_place_of_the_cuda_libraries(
    machine: Callable[..., tuple[list[str], str]],
) -> None:
    installed, said = machine("auto")
    assert installed == ["torch==2.13.0+cpu", WITHOUT]
    assert said.startswith("torch: PyTorch's CPU build is installed, without CUDA libraries: no NVIDIA GPU is seen")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("properties", "why"),
    [
        ({"gpu": True}, "there is an NVIDIA GPU"),
        ({"refused": "torch==2.13.0+cpu"}, "cannot be had (no torch==2.13.0+cpu)"),
    ],
)
def test_else_the_whole_lock_is_installed_and_it_is_said_why(
    machine: Callable[..., tuple[list[str], str]], properties: dict[str, object], why: str
) -> None:
    installed, said = machine("auto", **properties)
    assert installed == [LOCK]
    assert why in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("choice", ["auto", "cpu", "cuda"])
def test_beside_linux_there_is_nothing_to_choose(machine: Callable[..., tuple[list[str], str]], choice: str) -> None:
    assert machine(choice, system="darwin") == ([LOCK], "")


def test_a_choice_goes_before_what_is_seen(machine: Callable[..., tuple[list[str], str]]) -> None:
    assert machine("cpu", gpu=True)[0] == ["torch==2.13.0+cpu", WITHOUT]
    assert machine("cuda")[0] == [LOCK]


def test_a_choice_that_cannot_be_had_is_an_error(machine: Callable[..., tuple[list[str], str]]) -> None:
    with pytest.raises(SetupError, match=r"torch 2.13.0\+cpu is neither at https.*: no torch==2.13.0\+cpu"):
        machine("cpu", refused="torch==2.13.0+cpu")


def test_a_lock_that_pip_refuses_is_an_error(machine: Callable[..., tuple[list[str], str]]) -> None:
    with pytest.raises(SetupError, match="cannot be installed"):
        machine("auto", refused="numpy")


def test_the_shipped_locks_name_torch_and_hold_nothing_of_cuda_without_it() -> None:
    for name in ("requirements.lock", "requirements-vllm.lock", "requirements-oracle.lock"):
        lock = (Path(__file__).parents[2] / name).read_text(encoding="utf-8")
        assert torch_version(lock) == "2.13.0"
        assert "nvidia-cudnn-cu13==" in lock
        rest = without_cuda(lock)
        assert not [line for line in rest.splitlines() if line.startswith(("nvidia", "cuda", "triton", "torch="))]


def test_a_lock_without_torch_is_an_error() -> None:
    with pytest.raises(SetupError, match="no line torch==VERSION"):
        torch_version("numpy==2.0\n")


def test_a_gpu_is_seen_by_what_its_driver_makes(tmp_path: Path) -> None:
    assert not has_gpu([str(tmp_path / "nvidiactl")])
    assert has_gpu([str(tmp_path / "nothing"), str(tmp_path)])


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("ERROR: Could not find\nERROR: No match\nHINT: see\n", "No match"),
        ("Killed\n\n", "Killed"),
        ("", "pip says nothing"),
    ],
)
def test_a_refusal_is_the_line_that_says_why(output: str, reason: str) -> None:
    assert refusal(output) == reason
