"""Compiling C++ at its first use."""

import platform
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tailrace.engine.kernels import build
from tailrace.engine.kernels.build import KernelUnavailable, load
from tailrace.host.cache import cache_directory

ANSWER = """
#include <omp.h>
extern "C" int answer() {
    int threads = 0;
#pragma omp parallel num_threads(1)
    threads = omp_get_num_threads();
    return 41 + threads;
}
"""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of sources, and an empty cache beside it."""
    directory = tmp_path / "sources"
    directory.mkdir()
    (directory / "answer.cpp").write_text(ANSWER)
    monkeypatch.setattr(build, "SOURCES", directory)
    monkeypatch.setenv("TAILRACE_CACHE", str(tmp_path / "cache"))
    load.cache_clear()
    yield directory
    load.cache_clear()


def libraries() -> list[Path]:
    return sorted((cache_directory() / "kernels").iterdir())


def test_a_source_is_compiled_once_and_nothing_else_is_left(sources: Path) -> None:
    assert load("answer").answer() == 42
    [library] = libraries()
    compiled = library.stat().st_mtime_ns
    load.cache_clear()
    assert load("answer").answer() == 42
    assert libraries() == [library]
    assert library.stat().st_mtime_ns == compiled


@pytest.mark.parametrize("kept", [0, 100, 8000, -1])
def test_a_library_of_which_part_is_left_is_compiled_anew(sources: Path, kept: int) -> None:
    load("answer")
    [library] = libraries()
    content = library.read_bytes()
    library.unlink()  # the process still has it open
    library.write_bytes(content[:kept])
    load.cache_clear()
    assert load("answer").answer() == 42
    assert [path.stat().st_size for path in libraries()] == [len(content)]


def test_compiling_is_announced_and_loading_is_not(sources: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tailrace")
    for _ in range(2):
        load.cache_clear()
        load("answer")
    assert caplog.messages == ["compiling the answer kernel (once) …"]


def test_a_changed_source_or_header_is_compiled_anew(sources: Path) -> None:
    load("answer")
    for changed in ("answer.cpp", "some.h"):
        with (sources / changed).open("a") as file:
            file.write("// changed\n")
        before = len(libraries())
        load.cache_clear()
        load("answer")
        assert len(libraries()) == before + 1


def test_compilations_at_the_same_time_do_not_disturb_each_other(sources: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        loaded = [pool.submit(load.__wrapped__, "answer") for _ in range(3)]
    assert [future.result().answer() for future in loaded] == [42, 42, 42]
    assert len(libraries()) == 1


def test_libraries_share_the_openmp_runtime_of_torch(sources: Path) -> None:
    load("answer")
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc/self/maps here")
    runtimes = {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line}
    assert len(runtimes) == 1


def test_without_a_compiler_the_message_says_what_to_install(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(sources))
    with pytest.raises(KernelUnavailable, match=r"answer kernel needs a C\+\+ compiler: install g\+\+"):
        load("answer")


def test_a_compiler_variable_that_names_none_is_said(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(KernelUnavailable, match=r"\$CXX 'no-such-compiler'"):
        load("answer")


def test_the_compiler_of_the_variable_is_used(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = sources / "fake"
    fake.write_text("#!/bin/sh\necho 'fake: error: no such flag' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", f"{fake} -m64")
    with pytest.raises(KernelUnavailable, match="fake cannot compile the answer kernel: fake: error: no such flag"):
        load("answer")


def test_a_source_that_does_not_compile_is_one_line_with_the_error(sources: Path) -> None:
    (sources / "answer.cpp").write_text('extern "C" int answer() { return nothing; }')
    with pytest.raises(KernelUnavailable, match=r"cannot compile the answer kernel: .*nothing") as caught:
        load("answer")
    assert "\n" not in str(caught.value)
    assert libraries() == []


def test_a_compiler_that_does_not_end_is_ended(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = sources / "fake"
    fake.write_text("#!/bin/sh\nexec sleep 600\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    monkeypatch.setattr(build, "COMPILE_TIMEOUT_S", 0.05)
    with pytest.raises(KernelUnavailable, match="took over"):
        load("answer")


def test_a_cache_that_cannot_be_written_is_said(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILRACE_CACHE", str(sources / "answer.cpp"))
    with pytest.raises(KernelUnavailable, match="cannot be kept in"):
        load("answer")


def test_a_broken_library_is_said(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = sources / "fake"
    fake.write_text('#!/bin/sh\nfor last; do :; done\n[ "$1" = --version ] || echo broken > "$last"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    with pytest.raises(KernelUnavailable, match="cannot be loaded: "):
        load("answer")


def test_a_cpu_that_lacks_an_instruction_is_said(sources: Path) -> None:
    with pytest.raises(KernelUnavailable, match="needs a CPU with made_up"):
        load("answer", needs=("made_up",))


@pytest.mark.parametrize(("source", "flags"), [("decoder", []), ("decoder", ["-DIN_FP32"]), ("sampling", [])])
@pytest.mark.parametrize("cpu", ["sapphirerapids", "skylake-avx512", "haswell"])
def test_each_kind_of_cpu_has_every_function_of_the_kernels(source: str, flags: list[str], cpu: str) -> None:
    """The kernels of another CPU cannot run here, but its compiler must accept them."""
    compiler = next((path for name in build.COMPILERS if (path := shutil.which(name))), None)
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("no compiler for x86 here")
    command = [
        compiler,
        "-std=c++17",
        f"-march={cpu}",
        "-fopenmp",
        "-fsyntax-only",
        *flags,
        str(build.SOURCES / f"{source}.cpp"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
