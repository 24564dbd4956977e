"""Compiling C++ at first use, and the sampler's passes in it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tailrace.engine.kernels import build
from tailrace.engine.kernels.build import AVX512_BF16, KernelUnavailable, cpu_flags, load
from tailrace.engine.kernels.sampling import CpuPrimitives
from tailrace.engine.sampler import BLOCK, TorchPrimitives
from tests.engine.test_sampler import check_inversion

needs_avx512_bf16 = pytest.mark.skipif(not cpu_flags() >= set(AVX512_BF16), reason="this CPU has no AVX512-BF16")

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
    return sorted(build.cache_directory().iterdir())


def test_a_source_is_compiled_once_and_nothing_else_is_left(sources: Path) -> None:
    assert load("answer").answer() == 42
    [library] = libraries()
    compiled = library.stat().st_mtime_ns
    load.cache_clear()
    assert load("answer").answer() == 42
    assert libraries() == [library]
    assert library.stat().st_mtime_ns == compiled


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
    assert len(runtimes) <= 1


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
    with pytest.raises(KernelUnavailable, match="cannot be loaded; remove it"):
        load("answer")


def test_a_cpu_that_lacks_an_instruction_is_said(sources: Path) -> None:
    with pytest.raises(KernelUnavailable, match="needs a CPU with made_up"):
        load("answer", needs=("made_up",))


def logits_of(rows: int, width: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(rows).normal(0, 6, (rows, width)).astype(np.float32))


def weights_of(logits: torch.Tensor, maxima: torch.Tensor, scale: torch.Tensor) -> npt.NDArray[np.float64]:
    shifted = (logits - maxima[:, None]) * scale[:, None]
    weights: npt.NDArray[np.float64] = np.exp(shifted.numpy().astype(np.float64))
    return weights


@needs_avx512_bf16
@pytest.mark.parametrize(("rows", "width"), [(1, 256), (3, 1024), (7, 49152)])
def test_the_samplers_passes_are_those_of_numpy(rows: int, width: int) -> None:
    logits, scale = logits_of(rows, width), torch.linspace(0.5, 2.0, rows)
    logits[0, width // 2 :] = -torch.inf
    primitives = CpuPrimitives()
    maxima, indexes = primitives.maxima(logits)
    assert np.array_equal(maxima.numpy(), logits.numpy().max(-1))
    assert np.array_equal(indexes.numpy(), logits.numpy().argmax(-1))
    expected = weights_of(logits, maxima, scale)
    sums = primitives.block_sums(logits, maxima, scale).numpy()
    np.testing.assert_allclose(sums, expected.reshape(rows, -1, BLOCK).sum(-1), rtol=3e-7, atol=1e-37)
    check_inversion(primitives, logits, scale, torch.from_numpy(expected).view(rows, -1, BLOCK))


@needs_avx512_bf16
def test_of_equal_logits_the_first_is_the_largest() -> None:
    logits = torch.zeros(2, 512)
    logits[0, [37, 20, 400]] = 5.0
    assert CpuPrimitives().maxima(logits)[1].tolist() == [20, 0]


@needs_avx512_bf16
def test_a_shard_of_padding_alone_weighs_nothing() -> None:
    logits = torch.full((1, 256), -torch.inf)
    assert CpuPrimitives().maxima(logits)[0].tolist() == [-np.inf]
    assert CpuPrimitives().block_sums(logits, torch.ones(1), torch.ones(1)).tolist() == [[0.0]]


@needs_avx512_bf16
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_make_sums_that_are_not(bad: float) -> None:
    logits = logits_of(1, 512)
    logits[0, 300] = bad
    primitives = CpuPrimitives()
    sums = primitives.block_sums(logits, primitives.maxima(logits)[0], torch.ones(1))
    assert not sums.sum().isfinite()


@needs_avx512_bf16
def test_both_implementations_of_the_passes_agree() -> None:
    logits, scale = logits_of(5, 2048), torch.full((5,), 0.7)
    ours, theirs = CpuPrimitives(), TorchPrimitives()
    for mine, other in zip(ours.maxima(logits), theirs.maxima(logits), strict=True):
        assert torch.equal(mine, other)
    maxima = ours.maxima(logits)[0]
    sums = theirs.block_sums(logits, maxima, scale)
    torch.testing.assert_close(ours.block_sums(logits, maxima, scale), sums, rtol=1e-6, atol=0)
    draws = torch.tensor([0.0, 0.3, 0.5, 0.9, 1 - 1e-16], dtype=torch.float64)
    chosen, expected = ours.choose(sums, draws), theirs.choose(sums, draws)
    torch.testing.assert_close(chosen, expected, rtol=1e-9, atol=1e-9)
    block, inside, _ = expected
    found = ours.resolve(logits, block, inside, maxima, scale)
    torch.testing.assert_close(found, theirs.resolve(logits, block, inside, maxima, scale), rtol=1e-6, atol=0)
