"""Weights cross a real slow link between two networks once, however many receivers are behind it."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tailrace.transfer.weights.sender import WeightSender
from tests.transfer.remote.test_namespace import HERE, THERE, ip, namespace
from tests.transfer.weights.helpers import CHUNK_MIB, LIMIT_S, grouped, tensors
from tests.transfer.weights.peer import Peer, receive

__all__ = ["namespace"]


def crossed(name: str) -> int:
    """The bytes that have gone to the other network."""
    return int(Path(f"/sys/class/net/{name}-a/statistics/tx_bytes").read_text())


async def test_receivers_behind_a_slow_link_share_what_crosses_it(namespace: str) -> None:
    ip("-n", namespace, "link", "set", "lo", "up")
    with ExitStack() as stack:
        sender = stack.enter_context(
            WeightSender(chunk_mib=CHUNK_MIB, listen=(f"tcp://{HERE}:*",), datacentre="near", limit_s=5.0)
        )
        facts = {"datacentre": "far", "listen": (f"tcp://{THERE}:*",), "medium": "tcp", "scale": 8, "versions": 2}
        peers = [Peer(receive, namespace=namespace, name=f"engine-{n}", **facts) for n in range(3)]
        for peer in peers:
            stack.callback(peer.close)
            peer.pipe.send(sender.address)
        wakeups = sender._service.wakeups
        assert await wakeups.wait_for(lambda: len(sender._service.receivers) == 3 or None, timeout_s=LIMIT_S)
        before = crossed(namespace)
        sender.publish(0, tensors(0, scale=8).items())
        for peer in peers:
            assert (await peer.hear())[0] == 0
        nbytes = sender.stats().nbytes
        assert nbytes <= crossed(namespace) - before < 1.5 * nbytes  # includes what the network protocols add

        ip("link", "set", f"{namespace}-a", "down")
        sender.publish(1, tensors(1, scale=8).items())
        ip("link", "set", f"{namespace}-a", "up")
        for peer in peers:
            assert (await peer.hear())[0] == 1


async def test_a_broadcast_reaches_members_in_two_networks(namespace: str) -> None:
    ip("-n", namespace, "link", "set", "lo", "up")
    with ExitStack() as stack:
        sender = stack.enter_context(WeightSender(chunk_mib=CHUNK_MIB, listen=("ipc://*", f"tcp://{HERE}:*")))
        facts: dict[str, Any] = {"medium": "gloo", "versions": 2}
        near = Peer(receive, name="near", **facts)
        far = Peer(receive, namespace=namespace, name="far", listen=(f"tcp://{THERE}:*",), **facts)
        for peer in (near, far):
            stack.callback(peer.close)
            peer.pipe.send(sender.address)
        await grouped(sender, "near", "far")
        for version in range(2):
            sender.publish(version, tensors(version).items())
            for peer in (near, far):
                assert (await peer.hear())[0] == version
        stats = sender.stats()
        assert (stats.bytes_sent, stats.bytes_broadcast) == (0, 2 * stats.nbytes)
