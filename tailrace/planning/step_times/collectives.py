"""Seconds of exchanges among devices.

A device sends as many bytes as a bandwidth-optimal exchange must (Patarasu and Yuan 2009). Where a switch joins the
devices of a node, each reaches all others at once, and waits for one latency. On a bus, such as PCIe, an exchange goes
round a ring: each device passes on to the next what it got in the step before, and each of its n - 1 steps has a
latency. Between nodes, a node's devices exchange first among themselves, and then each with its peers of the other
nodes, on a part of the bytes.
"""

from dataclasses import dataclass

from tailrace.planning.hardware.base import Link, Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Devices that exchange, and the links that join them."""

    devices: int
    inside: Link
    """From a device to the others of its node."""
    network: Link
    per_node: int
    switched: bool = True
    """Whether a device reaches all others of its node at once."""

    @classmethod
    def of(cls, pool: Pool, devices: int, *, per_node: int | None = None) -> "Group":
        """So many devices of a pool, by default neighbours. `per_node`: those of them that a node can have."""
        return cls(
            devices=devices,
            inside=pool.inside,
            network=pool.network,
            per_node=pool.per_node if per_node is None else per_node,
            switched=pool.device.switched,
        )

    @property
    def near(self) -> int:
        """Devices of the group in one node."""
        return min(self.devices, self.per_node)

    @property
    def nodes(self) -> int:
        """Nodes that the group is spread over."""
        return -(-self.devices // self.per_node)


def all_reduce_s(size: float, group: Group, reach: float = 1.0) -> float:
    """Seconds until all devices have the sum of their tensors of `size` bytes.

    In one node with a switch, small tensors are sent whole to all others, at one latency.

    `reach`: the part of a link's bandwidth that exchanges reach.
    """
    seconds = reduce_scatter_s(size, group, reach) + all_gather_s(size, group, reach)
    if group.nodes > 1 or group.devices == 1 or not group.switched:
        return seconds
    whole = size * (group.devices - 1) / (group.inside.bytes_per_s * reach)
    return min(seconds, group.inside.latency_s + whole)


def reduce_scatter_s(size: float, group: Group, reach: float = 1.0) -> float:
    """Seconds until each device has its part of the sum of tensors of `size` bytes."""
    return all_gather_s(size, group, reach)


def all_gather_s(size: float, group: Group, reach: float = 1.0) -> float:
    """Seconds until all devices have the whole of `size` bytes, of which each had a part."""
    seconds = 0.0
    if group.near > 1:
        sent = size * (group.near - 1) / group.near
        steps = 1 if group.switched else group.near - 1
        seconds += steps * group.inside.latency_s + sent / (group.inside.bytes_per_s * reach)
    if group.nodes > 1:
        sent = size / group.near * (group.nodes - 1) / group.nodes
        seconds += group.network.latency_s + sent / (group.network.bytes_per_s * reach)
    return seconds
