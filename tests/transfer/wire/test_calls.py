"""The checks of outcomes, and the choice of endpoints."""

from pathlib import Path

import pytest

from tailrace.errors import LeaseError, WireError
from tailrace.transfer.wire.calls import expect
from tailrace.transfer.wire.frames import Reply
from tailrace.transfer.wire.messages import Accepted, Waiting
from tailrace.transfer.wire.sockets import host_id, reachable


def test_ipc_is_taken_where_its_path_is_seen_and_tcp_where_only_the_host_is_shared(tmp_path: Path) -> None:
    ipc = f"ipc://{tmp_path}/socket"
    assert reachable(["tcp://a:1", ipc], host_id()) == ["tcp://a:1", ipc]
    (tmp_path / "socket").touch()
    assert reachable(["tcp://a:1", ipc], host_id()) == [ipc, "tcp://a:1"]
    assert reachable(["tcp://a:1", ipc], "elsewhere") == ["tcp://a:1"]


def test_an_outcome_is_the_answer_that_was_expected_or_an_error() -> None:
    assert expect(Reply(Accepted()), Accepted) == Accepted()
    with pytest.raises(LeaseError):
        expect(LeaseError("gone"), Accepted)
    with pytest.raises(WireError, match="got the answer Waiting, expected Accepted"):
        expect(Reply(Waiting()), Accepted)
