"""A lack of the machine is reported in one line that names the key, before anything is written."""

import os
from pathlib import Path
from typing import Any

import pytest

from tailrace.config.transfer import ServiceQueueConfig
from tailrace.errors import ConfigError
from tailrace.transfer.queue.processes.preflight import check_service


def check(**values: Any) -> None:
    check_service(ServiceQueueConfig.model_validate(values))


@pytest.mark.parametrize("listen", ["192.0.2.1", "no.such.host.example", "not an address", "tcp://127.0.0.1", ""])
def test_an_address_of_another_machine_is_refused(listen: str) -> None:
    with pytest.raises(ConfigError, match=f"^queue.listen={listen}: this machine cannot listen there: .*127.0.0.1"):
        check(listen=listen, storage={"type": "memory"})


@pytest.mark.parametrize("kind", ["arena", "spill"])
@pytest.mark.parametrize(("directory", "why"), [("none", "No such file"), ("file", "Not a directory"), ("/proc", "")])
def test_a_directory_that_cannot_be_written_to_is_refused(tmp_path: Path, kind: str, directory: str, why: str) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / directory
    with pytest.raises(ConfigError, match=f"^queue.storage.directory={path}: {why}.*; give "):
        check(storage={"type": kind, "directory": str(path)})


@pytest.mark.parametrize("kind", ["arena", "spill"])
def test_a_directory_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    values = list(os.statvfs(tmp_path))
    values[4] = 0  # the number of free blocks
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(values))
    with pytest.raises(ConfigError, match=f"^queue.storage.directory={tmp_path} is full; make room there"):
        check(storage={"type": kind, "directory": str(tmp_path)})


def test_what_is_there_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "own").mkdir()
    for kind in ("arena", "spill"):
        check(storage={"type": kind, "directory": "~/own"})
    assert list((tmp_path / "own").iterdir()) == []


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://127.0.0.1:1/0", "Redis at 127.0.0.1:1 failed: .*refused"),
        ("unix:///nowhere", "Redis at /nowhere failed: "),
        ("http://127.0.0.1", "queue.storage.url is no address of a Redis server: .*scheme"),
        ("redis://:hunter/2@127.0.0.1:6379", "queue.storage.url is no address of a Redis server: it cannot be read;"),
    ],
)
def test_a_redis_server_that_is_not_there_is_refused_without_its_password(url: str, why: str) -> None:
    pytest.importorskip("redis", reason="the package redis is not installed")
    with pytest.raises(ConfigError, match=f"^queue.storage.type=redis: {why}") as refused:
        check(storage={"type": "redis", "url": url, "timeout_s": 1.0})
    assert "hunter" not in str(refused.value)
