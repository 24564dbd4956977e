"""Where a sender of weights is, and where its messages go."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from tailrace.errors import WeightsError
from tailrace.transfer.socket_directory import socket_directory
from tailrace.transfer.wire.sockets import reachable

PRIVATE = "ipc://*"
"""A socket in a new directory that only this user may enter, and that goes with its process."""
LISTEN = (PRIVATE, "tcp://127.0.0.1:*")
"""For peers on this host alone; those on others need an address of the network, such as tcp://10.0.0.7:*."""


class WeightsAddress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a sender listens, and what lets a receiver in. Receivers know each other by the same token."""

    endpoints: list[str]
    host: str
    """The sender's, see `sockets.host_id`."""
    token: bytes

    def __repr__(self) -> str:
        """Without the token: it shall not be found in logs."""
        return f"WeightsAddress(endpoints={self.endpoints}, host={self.host!r})"


def endpoint_towards(endpoints: Sequence[str], host: str) -> str:
    """The endpoint by which this process reaches a peer on `host`.

    Raises:
        WeightsError: there is none.
    """
    ways = reachable(endpoints, host)
    if not ways:
        raise WeightsError(
            f"weights are at {list(endpoints)} alone, which cannot be reached from this host; "
            f"let sender and receivers listen at an address of the network, such as tcp://10.0.0.7:*"
        )
    return ways[0]


def host_of(address: WeightsAddress) -> str:
    """Where a sender's machine is found by all who can reach the sender."""
    far = (endpoint for endpoint in address.endpoints if is_far_reaching(endpoint))
    endpoint = next(far, "tcp://127.0.0.1:0")
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")


@contextmanager
def listening(endpoints: Sequence[str]) -> Iterator[list[str]]:
    """The endpoints with a private directory's for each `PRIVATE`."""
    with socket_directory() as directory:
        yield [f"ipc://{directory}/socket" if endpoint == PRIVATE else endpoint for endpoint in endpoints]


def is_far_reaching(endpoint: str) -> bool:
    """Whether other hosts may reach it."""
    local = ("ipc:", "tcp://127.", "tcp://localhost", "tcp://[::1]")
    return not endpoint.startswith(local)
