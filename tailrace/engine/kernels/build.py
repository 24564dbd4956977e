"""Compiles a C++ source of this package for this machine at first use, and loads it.

Sources have a plain C interface and include no torch headers. So only a compiler is needed, and a library serves every
torch. Libraries are kept in the cache directory under a hash of all that decides what they contain. They end with a
digest of themselves: a library that a full disk or a power cut left in part could kill the process that loads it.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch  # noqa: F401  (its OpenMP runtime has to be the process's first, which libraries then share)

from tailrace.errors import EngineError, one_line
from tailrace.host.cache import cache_directory, make_private
from tailrace.host.cpu import cpu_flags

SOURCES = Path(__file__).parent
COMPILERS = ("g++", "c++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
COMPILE_TIMEOUT_S = 300.0
_DIGEST_BYTES = hashlib.sha256().digest_size
VECTORS = ("avx2", "fma")
"""CPU flags that the kernels of `simd.h` need. They are faster with AVX512, AVX512-BF16 and AMX."""


class KernelUnavailable(EngineError):
    """A kernel is not available on this machine; the message says why and what would help."""


@functools.cache
def load(name: str, *, needs: tuple[str, ...] = (), define: str | None = None) -> ctypes.CDLL:
    """Load the library of `name`.cpp in this package, compiled if it has not been yet. Safe in concurrent processes.

    Args:
        name: Of the source.
        needs: Flags of /proc/cpuinfo, without which the library would not run.
        define: A macro that is defined for the source.

    Raises:
        KernelUnavailable: the CPU lacks a flag, there is no compiler, or the compiler fails.
    """
    if missing := set(needs) - cpu_flags():
        raise KernelUnavailable(f"the {name} kernel needs a CPU with {', '.join(sorted(missing))}")
    source = SOURCES / f"{name}.cpp"
    compiler, flags = _compiler(name), FLAGS if define is None else (*FLAGS, f"-D{define}")
    library = cache_directory() / "kernels" / f"{name}-{_fingerprint(source, compiler, flags)}.so"
    if not _is_whole(library):
        logging.getLogger(__name__).info("compiling the %s kernel (once) …", name)
        _compile(source, (*compiler, *flags), library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelUnavailable(f"{library} cannot be loaded: {one_line(error)}") from None


def _compiler(name: str) -> tuple[str, ...]:
    """Return the command of $CXX, or else of the first compiler that is installed."""
    if own := os.environ.get("CXX"):
        command = tuple(shlex.split(own))
        if not command or shutil.which(command[0]) is None:
            raise KernelUnavailable(f"the {name} kernel needs a C++ compiler and $CXX {own!r} is none; unset or fix it")
        return command
    found = next((path for compiler in COMPILERS if (path := shutil.which(compiler))), None)
    if found is None:
        raise KernelUnavailable(f"the {name} kernel needs a C++ compiler: install {', '.join(COMPILERS)} or set $CXX")
    return (found,)


def _fingerprint(source: Path, compiler: tuple[str, ...], flags: tuple[str, ...]) -> str:
    """A hash of the sources, the compiler, its flags and the CPU."""
    parts = [path.read_bytes() for path in (source, *sorted(SOURCES.glob("*.h")))]
    parts += [_run((*compiler, "--version"), source.stem), repr((compiler, flags)).encode()]
    parts += [platform.machine().encode(), " ".join(sorted(cpu_flags())).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _is_whole(library: Path) -> bool:
    """Whether the library is there, as it was compiled."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def _compile(source: Path, command: tuple[str, ...], library: Path) -> None:
    """Compile beside the final name and rename, so that other processes see the whole library or none."""
    try:
        make_private(library.parent)
        with tempfile.TemporaryDirectory(dir=library.parent) as directory:
            made = Path(directory) / library.name
            _run((*command, str(source), "-o", str(made)), source.stem)
            with made.open("ab") as file:
                file.write(hashlib.sha256(made.read_bytes()).digest())
            os.replace(made, library)
    except OSError as error:
        raise KernelUnavailable(f"compiled kernels cannot be kept in {library.parent}: {one_line(error)}") from None


def _run(command: tuple[str, ...], name: str) -> bytes:
    """Run the compiler. Return what it prints."""
    try:
        return subprocess.run(command, capture_output=True, check=True, timeout=COMPILE_TIMEOUT_S).stdout
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").splitlines()
        first = next((line for line in said if "error" in line), said[0] if said else f"exit code {error.returncode}")
        raise KernelUnavailable(f"{command[0]} cannot compile the {name} kernel: {first.strip()}") from None
    except subprocess.TimeoutExpired:
        raise KernelUnavailable(f"{command[0]} took over {COMPILE_TIMEOUT_S:.0f} s for the {name} kernel") from None
    except OSError as error:
        raise KernelUnavailable(f"{command[0]} cannot be run: {one_line(error)}") from None
