"""Storages that users write: the one of docs/adapters.md with Mooncake, where it is installed, and early errors."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tailrace.config.transfer import AdapterStorageConfig, ServiceQueueConfig
from tailrace.errors import UserError
from tailrace.transfer.queue.client.sync_queue import SyncQueue
from tailrace.transfer.queue.processes.preflight import check_service
from tailrace.transfer.queue.processes.supervisor import QueueProcesses
from tailrace.transfer.queue.storage.adapter import StorageArgs
from tailrace.transfer.queue.storage.factory import make_storage
from tailrace.transfer.queue.storage.keyed import KeyedStorage
from tests.helpers.waiting import until
from tests.transfer.processes.test_supervisor import LIMIT_S, TABLE
from tests.transfer.storage.keyed import DictOfBytes
from tests.transfer.tables import group, outputs, tokens

PAGE = (Path(__file__).parents[3] / "docs" / "adapters.md").read_text()
MODULES = dict(re.findall(r"```python\n# (\w*my_storage)\.py\n(.*?)```", PAGE, re.DOTALL))
HERE = "tests.transfer.storage.test_adapter"


def in_a_dict(args: StorageArgs, *, prefix: str = "") -> KeyedStorage:
    return KeyedStorage(DictOfBytes(), name=prefix + args.name, max_bytes=args.max_bytes)


def no_storage(args: StorageArgs) -> str:
    return "a text"


def adapter(name: str, **options: object) -> AdapterStorageConfig:
    return AdapterStorageConfig(path=f"{HERE}.{name}", options=options, max_bytes=2**20)


def test_a_queue_keeps_its_rows_in_the_storage_that_its_recipe_names(tmp_path: Path) -> None:
    config = ServiceQueueConfig(units=1, storage=adapter("in_a_dict", prefix="mine-"))
    check_service(config)
    with (
        QueueProcesses(config, TABLE, tmp_path) as processes,
        SyncQueue(processes.address, name="test", timeout_s=LIMIT_S) as client,
    ):
        client.put(group(0, prompt=3000))
        claim = client.claim("rollout")
        client.ack(claim, outputs(claim, response_ids=tokens(5000)))
        claim = client.claim("sink")
        assert len(claim.rows[0].cells["response_ids"]) == 5000  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (adapter("nothing"), r"^queue\.storage\.path '.*nothing': module '.*' has no 'nothing'"),
        (adapter("in_a_dict", suffix="x"), r"^queue\.storage\.path .* cannot be called with \(args, suffix=\)"),
    ],
)
def test_a_storage_that_cannot_be_made_is_refused_before_anything_is_written(
    config: AdapterStorageConfig, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_service(ServiceQueueConfig(storage=config))


def test_what_is_no_storage_is_named() -> None:
    with pytest.raises(UserError, match=r"no_storage' made a str; it must make a tailrace\.transfer"):
        make_storage(adapter("no_storage"), name="unit-0")


def answers(port: int) -> bool:
    """Whether something listens at a port of this machine."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def master() -> Iterator[str]:
    """The address of a Mooncake."""
    spec = find_spec("mooncake")
    if spec is None or spec.origin is None:
        pytest.skip("mooncake is not installed")
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        port, metrics = one.getsockname()[1], other.getsockname()[1]
    program = Path(spec.origin).parent / "mooncake_master"
    command = [str(program), f"-rpc_port={port}", f"-metrics_port={metrics}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            until(lambda: answers(port))
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


def test_the_storage_of_the_page_keeps_the_contract_and_the_rows_of_a_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, master: str
) -> None:
    for name, code in MODULES.items():
        (tmp_path / f"{name}.py").write_text(code)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_storage.py"]
    environment = {**os.environ, "MOONCAKE_MASTER": master}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout
    monkeypatch.chdir(tmp_path)
    storage = AdapterStorageConfig(path="my_storage.make_storage", options={"master": master}, max_bytes=2**24)
    with (
        QueueProcesses(ServiceQueueConfig(units=2, storage=storage), TABLE, tmp_path / "queue") as processes,
        SyncQueue(processes.address, name="test", timeout_s=LIMIT_S) as client,
    ):
        for number in range(4):
            client.put(group(number, prompt=3000))
        for _ in range(4):
            claim = client.claim("rollout")
            assert len(claim.rows[0].cells["prompt_ids"]) == 3000  # type: ignore[arg-type]
            client.ack(claim, outputs(claim, response_ids=tokens(5000)))
        assert [len(client.claim("sink").rows[0].cells["response_ids"]) for _ in range(4)] == [5000] * 4  # type: ignore[arg-type]
