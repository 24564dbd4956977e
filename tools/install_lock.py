"""Install a lock into the environment of this interpreter, with the build of PyTorch that suits the machine.

    python tools/install_lock.py requirements.lock --torch auto

PyPI's wheels of torch for Linux are built for CUDA, and cannot be imported without the CUDA libraries that are locked.
PyTorch's CPU builds need none of those, and are on PyTorch's own index alone. For `--torch`:

    auto   like cpu where no NVIDIA GPU is seen and the CPU build can be had, else like cuda
    cpu    the CPU build, without the CUDA libraries
    cuda   the lock as it is: PyPI's build, with the CUDA libraries

On systems other than Linux, PyPI has one build, which needs no CUDA library, so all three are the same there. Only the
standard library and pip are available when this runs.
"""

import argparse
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CHOICES = ("auto", "cpu", "cuda")
_INSTALL = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile")
_IMPATIENTLY = ("--timeout", "15", "--retries", "1")
"""Options for PyTorch's index: it may be out of reach, and pip then gives up soon."""
CUDA = re.compile(r"(nvidia|cuda)-|triton\b")
"""Beginnings of the names of the CUDA libraries."""
_GPU_SIGNS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")
"""Files that the driver of an NVIDIA GPU makes; the last one is for Windows' Linux."""


class SetupError(Exception):
    """Raised where the lock cannot be installed as asked for."""


def without_cuda(lock: str) -> str:
    """Return the lock without torch, which has been installed, and without the CUDA libraries that PyPI's build
    needs."""
    lines = lock.splitlines(keepends=True)
    return "".join(line for line in lines if not CUDA.match(line) and not line.startswith("torch=="))


def torch_version(lock: str) -> str:
    """Return the version of torch in the lock."""
    found = re.search(r"^torch==([\w.]+)", lock, re.MULTILINE)
    if found is None:
        raise SetupError("the lock has no line torch==VERSION")
    return found[1]


def has_gpu(signs: Iterable[str] = _GPU_SIGNS) -> bool:
    """Return whether the driver of an NVIDIA GPU is there."""
    return any(Path(sign).exists() for sign in signs)


def refusal(pip_output: str) -> str:
    """Return why pip installs nothing: the last line that names an error, otherwise the last line."""
    lines = [line.strip() for line in pip_output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip says nothing"])[-1].removeprefix("ERROR:").strip()


def install(lock: Path, choice: str) -> None:
    """Install what the lock lists, and say which build of torch is chosen, and why.

    Raises:
        SetupError: the lock cannot be installed, or not with the build that was asked for.
    """
    _check_compiler()
    text = lock.read_text(encoding="utf-8")
    if sys.platform == "linux" and _prefers_cpu(choice) and _install_cpu_build(torch_version(text), choice):
        text = without_cuda(text)
    with tempfile.NamedTemporaryFile("w", suffix=".lock", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        if subprocess.run([*_INSTALL, "--requirement", file.name]).returncode:
            raise SetupError(f"{lock} cannot be installed; pip says above why")


def _prefers_cpu(choice: str) -> bool:
    if choice == "auto" and has_gpu():
        _say("there is an NVIDIA GPU, so PyPI's build with its CUDA libraries is installed")
        return False
    return choice != "cuda"


def _install_cpu_build(version: str, choice: str) -> bool:
    """Install PyTorch's CPU build, and return whether that succeeded."""
    command = [*_INSTALL, *_IMPATIENTLY, "--extra-index-url", CPU_INDEX, f"torch=={version}+cpu"]
    tried = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if tried.returncode == 0:
        _say("PyTorch's CPU build is installed, without CUDA libraries" + _reason(choice))
        return True
    if choice == "cpu":
        raise SetupError(f"torch {version}+cpu is neither at {CPU_INDEX} nor where pip looks: {refusal(tried.stdout)}")
    _say(f"PyTorch's CPU build cannot be had ({refusal(tried.stdout)}), so PyPI's with its CUDA libraries is installed")
    return False


def _reason(choice: str) -> str:
    return ": no NVIDIA GPU is seen (TORCH=cuda installs them all the same)" if choice == "auto" else ""


def _check_compiler() -> None:
    """Check that the one package without a wheel can be compiled; pip would take a hundred lines to say so.

    Raises:
        SetupError: Python's headers are missing.
    """
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.is_file():
        raise SetupError(f"{header} is missing, and pycosat is compiled; on Debian and Ubuntu: apt install python3-dev")


def _say(line: str) -> None:
    print(f"torch: {line}", flush=True)


def main() -> None:
    """Install a lock from the command line; an error is one line on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lock", type=Path)
    parser.add_argument("--torch", choices=CHOICES, default="auto")
    arguments = parser.parse_args()
    try:
        install(arguments.lock, arguments.torch)
    except SetupError as error:
        sys.exit(f"install_lock: {error}")


if __name__ == "__main__":
    main()
