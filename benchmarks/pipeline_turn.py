"""Runs pipeline_run.py in a process of its own."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from gate import see_off

from tailrace.host.allocator import KEPT_MEMORY

HERE = Path(__file__).parent


@contextmanager
def training(
    directory: Path, config: str, *, warm_up: int, steps: int, files: Mapping[str, bytes] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """Train within the block, which waits for the end of the process, or ends it.

    Args:
        directory: of the run; what an earlier one has left there is removed.
        config: of the run, as JSON.
        warm_up: the steps that do not count.
        steps: all of them.
        files: further files of the directory, by name.

    Raises:
        RuntimeError: the run failed.
    """
    shutil.rmtree(directory, ignore_errors=True)
    for name, content in {**(files or {}), "config.json": config.encode()}.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    command = [sys.executable, str(HERE / "pipeline_run.py"), str(directory), str(warm_up), str(steps)]
    with (
        (directory / "log").open("wb") as log,
        subprocess.Popen(command, cwd=HERE, env={**os.environ, **KEPT_MEMORY}, stdout=log, stderr=log) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            see_off(process)
    if process.returncode:
        raise RuntimeError(f"{directory.name} ended with exit code {process.returncode}; see {directory / 'log'}")
