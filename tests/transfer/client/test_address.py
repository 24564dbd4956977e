import stat
from pathlib import Path

import pytest

from tailrace.errors import UserError
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.wire.sockets import host_id

TOKEN = b"a token that nobody guesses"


def address(*endpoints: str, host: str | None = None) -> QueueAddress:
    return QueueAddress(endpoints=list(endpoints), host=host or host_id(), token=TOKEN)


def test_it_is_read_as_it_was_written_and_nobody_else_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "connection.json"
    first, second = address("ipc:///a", "tcp://h:1"), address("tcp://h:2")
    first.write(path)
    assert QueueAddress.read(path) == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    second.write(path)
    assert QueueAddress.read(path) == second
    assert list(tmp_path.iterdir()) == [path], "nothing else is left"


def test_the_controller_is_reached_by_ipc_where_its_socket_is_seen_and_by_tcp_from_elsewhere(tmp_path: Path) -> None:
    ipc = f"ipc://{tmp_path}/socket"
    assert address("tcp://h:1", ipc).endpoint == "tcp://h:1"
    (tmp_path / "socket").touch()
    assert address("tcp://h:1", ipc).endpoint == ipc
    assert address("ipc:///a", "tcp://h:1", host="elsewhere").endpoint == "tcp://h:1"
    with pytest.raises(UserError, match="cannot be reached from this host"):
        _ = address("ipc:///a", host="elsewhere").endpoint


def test_its_token_is_not_shown() -> None:
    assert "nobody" not in repr(address("ipc:///a"))


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "connection.json"
    address("ipc:///a").write(path)
    path.chmod(0o640)
    with pytest.raises(UserError, match=r"others can read it \(mode 0640\): chmod 600"):
        QueueAddress.read(path)


def test_what_is_no_address_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "connection.json"
    with pytest.raises(UserError, match="No such file or directory; give the file that"):
        QueueAddress.read(path)
    path.write_bytes(b"queue: {units: 2}")
    path.chmod(0o644)
    with pytest.raises(UserError, match=r"is not the address of a queue: JSON is malformed.*; give the file that"):
        QueueAddress.read(path)
    path.write_bytes(b'{"host": "\xff"}')
    with pytest.raises(UserError, match=r"is not the address of a queue"):
        QueueAddress.read(path)
    path.chmod(0o600)
    path.write_text('{"endpoints": []}')
    with pytest.raises(UserError, match="is not the address of a queue: Object missing required field `host`"):
        QueueAddress.read(path)
    with pytest.raises(UserError, match="cannot be written to"):
        address("ipc:///a").write(tmp_path / "nowhere" / "connection.json")
