"""Devices in pools, pools in clusters, and the links between them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tailrace.config.hardware import DeviceConfig
from tailrace.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A way for bytes, in one direction."""

    bytes_per_s: float
    latency_s: float = 0.0

    def seconds(self, size: float) -> float:
        """Seconds until `size` bytes have arrived."""
        return self.latency_s + size / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Nodes of one kind at one place."""

    name: str
    kind: str
    """The kind of device, such as H100."""
    device: DeviceConfig
    nodes: int
    per_node: int
    """Devices of a node."""
    datacentre: str = ""
    network: Link
    """From a device to other nodes."""
    usd_per_hour: float
    """Price of a device for an hour."""

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.nodes * self.per_node

    @property
    def inside(self) -> Link:
        """From a device to the others of its node."""
        return Link(bytes_per_s=self.device.link_gb_s * 1e9, latency_s=self.device.link_us * 1e-6)

    def link(self, devices: int) -> Link:
        """The slowest link within a group of so many devices that stand side by side."""
        return self.inside if devices <= self.per_node else self.network


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Pools, in the order of their file."""

    pools: tuple[Pool, ...]
    wide: Mapping[frozenset[str], Link] = field(default_factory=dict)
    """The links between datacentres, by the two; the devices there share it."""

    @property
    def devices(self) -> int:
        """Number of devices."""
        return sum(pool.devices for pool in self.pools)

    def pool(self, name: str) -> Pool:
        """The pool of a name.

        Raises:
            PlanError: there is none.
        """
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise PlanError(f"the cluster has no pool {name!r}; it has {', '.join(pool.name for pool in self.pools)}")

    def between(self, source: Pool, target: Pool) -> Link:
        """The link from one pool to another, for all of its devices together.

        Raises:
            PlanError: they are in two datacentres without a link.
        """
        if source.datacentre != target.datacentre:
            pair = frozenset((source.datacentre, target.datacentre))
            if pair not in self.wide:
                raise PlanError(
                    f"there is no link between the datacentres {source.datacentre!r} (pool {source.name}) and "
                    f"{target.datacentre!r} (pool {target.name}); add one to the cluster file: links: [{{between: "
                    f"[{source.datacentre}, {target.datacentre}], gb_s: 10}}]"
                )
            return self.wide[pair]
        rates = (pool.devices * pool.network.bytes_per_s for pool in (source, target))
        return Link(bytes_per_s=min(rates), latency_s=max(source.network.latency_s, target.network.latency_s))
