"""The address of a sender of weights, and the endpoint by which a process reaches it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from tailrace.errors import WeightsError
from tailrace.transfer.socket_directory import socket_directory
from tailrace.transfer.wire.sockets import reachable

PRIVATE = "ipc://*"
"""A socket in a new directory that only this user may enter. The directory lasts as long as its process."""
LISTEN = (PRIVATE, "tcp://127.0.0.1:*")
"""Endpoints for peers on this host. Peers on other hosts need an address of the network, such as tcp://10.0.0.7:*."""


class WeightsAddress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sender's endpoints, and the token that lets a receiver in. Receivers know each other by the same token."""

    endpoints: list[str]
    host: str
    """The sender's host; see `sockets.host_id`."""
    token: bytes

    def __repr__(self) -> str:
        """Leave out the token, so that it does not appear in logs."""
        return f"WeightsAddress(endpoints={self.endpoints}, host={self.host!r})"


def endpoint_towards(endpoints: Sequence[str], host: str) -> str:
    """The endpoint by which this process reaches a peer on `host`.

    Raises:
        WeightsError: this process can reach none of them.
    """
    ways = reachable(endpoints, host)
    if not ways:
        raise WeightsError(
            f"weights are at {list(endpoints)} alone, which cannot be reached from this host; "
            f"let sender and receivers listen at an address of the network, such as tcp://10.0.0.7:*"
        )
    return ways[0]


def host_of(address: WeightsAddress) -> str:
    """The address of the sender's machine, for every process that can reach the sender."""
    far = (endpoint for endpoint in address.endpoints if is_far_reaching(endpoint))
    endpoint = next(far, "tcp://127.0.0.1:0")
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")


@contextmanager
def listening(endpoints: Sequence[str]) -> Iterator[list[str]]:
    """The endpoints, with each `PRIVATE` replaced by a socket in a private directory that exists inside the block."""
    with socket_directory() as directory:
        yield [f"ipc://{directory}/socket" if endpoint == PRIVATE else endpoint for endpoint in endpoints]


def is_far_reaching(endpoint: str) -> bool:
    """Whether other hosts may reach the endpoint."""
    local = ("ipc:", "tcp://127.", "tcp://localhost", "tcp://[::1]")
    return not endpoint.startswith(local)
