"""Shared fixtures: one torch thread, and tiny random models of every family."""

import functools
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tailrace import cli
from tailrace.events import Event, EventLog
from tests.helpers.effort import effort

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a script starts with SIGINT ignored
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and one of `nohup` with SIGHUP
settings.register_profile(
    "tests",
    max_examples=effort(100, 30),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")  # no hypothesis test has a deadline, and a failure repeats

TinyModel = Callable[..., Path]
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.hookimpl(optionalhook=True)  # the environment of the vLLM tests has no xdist
def pytest_xdist_auto_num_workers() -> int:
    """Twice as many workers as cores: the tests wait for other processes almost half of their time."""
    return 2 * (os.cpu_count() or 1)


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """Undo what a run in this process has set: with more threads than cores, later tests take a hundred times as long,
    and long tensors have other bits."""
    yield
    torch.set_num_threads(1)


@pytest.fixture
def events() -> list[Event]:
    """The events that `log` received."""
    return []


@pytest.fixture
def log(events: list[Event]) -> EventLog:
    """An event log without a file."""
    return EventLog(sinks=(events.append,))


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    """A device: an executor of one thread."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        yield pool


@pytest.fixture
def tailrace_here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """`tailrace_here("train", …)` runs `tailrace train …` in this process, which has imported PyTorch already."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        log = logging.getLogger("tailrace")
        handlers, level = log.handlers.copy(), log.level
        monkeypatch.setattr(sys, "argv", ["tailrace", *arguments])
        capfd.readouterr()
        try:
            with pytest.raises(SystemExit) as end:
                cli.main()
        finally:
            log.handlers, log.level = handlers, level
        said = capfd.readouterr()
        return subprocess.CompletedProcess(arguments, int(end.value.code or 0), said.out, said.err)

    return run


@pytest.fixture(scope="session")
def connected_to_ray() -> Iterator[None]:
    """Share one Ray among all runs of this process."""
    import ray
    from ray import _raylet

    from tailrace.cluster.connection import connect
    from tailrace.cluster.environment import ray_environment

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(dir="/tmp") as directory:
        for name, value in ray_environment(os.environ).items():
            patch.setenv(name, value)
        # Ray has read the environment when a test imported it
        patch.setattr(ray._private.ray_constants, "ENABLE_RAY_CLUSTER", False)
        _raylet.Config.initialize("")  # type: ignore[attr-defined]  # not in its stubs
        try:
            connect(None, Path(directory))
            yield
        finally:
            ray.shutdown()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """`tiny_model("llama")` writes a random Llama once and returns its directory."""
    from tailrace.conformance.tiny import write_tiny_model

    @functools.cache
    def get(family: str, *, head_dim: int = 16) -> Path:
        return write_tiny_model(family, tmp_path_factory.mktemp("models") / family, head_dim=head_dim)

    return get
